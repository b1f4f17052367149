"""Training without a barrier: every stage updates its weights after each mini-batch by itself."""
