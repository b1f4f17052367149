"""this device: key, folder, what it remembers."""
