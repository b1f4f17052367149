"""What runs inside a device for the rivals: `python -m tools.bench.worker TASK JSON`.

A worker loads everything and says `ready`; the device is then held to its share, and the worker is
asked to go. One JSON object a line each way.
"""
