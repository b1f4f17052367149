"""Training without a barrier."""
