"""messages over one byte stream."""
