"""Messages over one byte stream."""
