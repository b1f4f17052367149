"""The training script and the device processes of `p2ptrain demo`."""
