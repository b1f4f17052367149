"""Raft's leader election with pre-vote."""
