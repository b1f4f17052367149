"""Frames, lanes, TLS links: bytes between two devices. Knows nothing of tensors or jobs."""
