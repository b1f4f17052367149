"""a device's part in the jobs of others."""
