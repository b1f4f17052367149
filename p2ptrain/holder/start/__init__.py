"""What comes before a job's first generation."""
