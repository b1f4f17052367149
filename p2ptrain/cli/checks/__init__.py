"""The questions that `p2ptrain doctor` asks, a file a subject."""
