"""A device's part in the jobs of others."""
