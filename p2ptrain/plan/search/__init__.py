"""`auto`: candidates of every kind, and the search that improves them."""
