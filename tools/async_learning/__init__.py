"""What learning loses and gains without a barrier, on real MNIST; see `__main__`."""
