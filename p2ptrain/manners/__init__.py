"""Manners: how a device looks after the person whose it is."""
