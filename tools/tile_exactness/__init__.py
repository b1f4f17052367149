"""Tiled training beside plain torch, in one process."""
