"""sockets, TLS, listening, dialling."""
