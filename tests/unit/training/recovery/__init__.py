"""The rules of recovery, without torch and without a network."""
