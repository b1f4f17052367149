"""A simulated round as a picture."""
