"""tasks, threads, loops."""
