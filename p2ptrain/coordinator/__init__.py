"""Plans for the holders of jobs."""
