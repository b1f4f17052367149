"""who is trusted: pairing and introductions."""
