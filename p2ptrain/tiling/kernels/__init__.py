"""A captured model's first units, cut into tiles and computed exactly."""
