"""The user's data on its way into the pipeline."""
