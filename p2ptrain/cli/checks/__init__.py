"""The checks of `p2ptrain doctor`, one file a subject."""
