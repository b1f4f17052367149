"""A seeded discrete-event simulator of whole households, for protocol cores without IO."""
