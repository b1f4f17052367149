"""p2ptrain beside what a user would pick instead, on the same emulated household."""
