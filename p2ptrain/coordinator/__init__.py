"""plans, and makes every device ready."""
