"""Every job message, as checked data."""
