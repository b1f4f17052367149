"""Which devices are trusted: pairing, introductions, removals."""
