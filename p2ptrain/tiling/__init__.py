"""Face of the wing."""
