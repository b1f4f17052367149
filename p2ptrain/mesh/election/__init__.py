"""Raft's leader election with pre-vote, without a fixed list of voters."""
