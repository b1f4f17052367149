"""tensors as bytes."""
