"""the model as data."""
