"""A plan timed: the event-driven simulator, and lower bounds on what it would say."""
