"""What tiling a model's first units costs, and the best way to do it. Pure."""
