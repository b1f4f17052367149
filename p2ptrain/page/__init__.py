"""The live web page of a member: one state for all who look, as JSON, a stream and metrics."""
