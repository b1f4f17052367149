"""One state machine a role: events in, instructions out."""
