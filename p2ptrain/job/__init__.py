"""what the user asks for."""
