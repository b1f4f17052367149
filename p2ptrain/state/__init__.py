"""Tensors of a job by version: stored, moved, written to disk."""
