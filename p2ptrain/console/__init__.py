"""What others may watch: events and their renderings. Receives events only."""
