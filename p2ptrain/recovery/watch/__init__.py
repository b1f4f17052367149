"""What shows while a generation runs: devices that drift, stand still, or could do better."""
