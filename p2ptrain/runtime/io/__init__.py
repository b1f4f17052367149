"""micro-batch traffic between stages."""
