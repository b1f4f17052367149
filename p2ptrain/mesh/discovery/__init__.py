"""where the others may be."""
