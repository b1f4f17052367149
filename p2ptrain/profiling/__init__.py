"""how long a device takes for a model's units."""
