"""How events are shown to users and programs. Receives events only."""
