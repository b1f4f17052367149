"""The one place that names the version; the build reads it from here."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 11
"""Version of the wire protocol. Devices with different numbers refuse each other in plain words."""
