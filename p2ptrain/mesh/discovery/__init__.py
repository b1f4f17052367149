"""Finds addresses at which other devices may be."""
