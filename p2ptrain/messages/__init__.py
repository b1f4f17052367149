"""every job message, as checked data."""
