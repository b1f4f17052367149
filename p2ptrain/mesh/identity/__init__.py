"""This device: its key, its state folder, its name."""
