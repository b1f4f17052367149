"""Micro-batch traffic between stages."""
