"""Runs the stages of one device: executors, their input and output, all-reduce."""
