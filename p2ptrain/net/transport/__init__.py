"""Sockets, TLS, listening, dialling."""
