"""exactly the commands."""
