"""Versions to go back to: copies at backup peers, full snapshots, checkpoints."""
