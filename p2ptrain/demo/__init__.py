"""What `p2ptrain demo` needs besides the command: a real training script and device processes."""
