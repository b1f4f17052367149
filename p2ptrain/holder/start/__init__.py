"""what comes before a job's first generation."""
