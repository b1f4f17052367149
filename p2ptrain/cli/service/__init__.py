"""`join` as a service of the system: what to write and to run (pure), and a shell that does it."""
