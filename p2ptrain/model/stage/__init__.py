"""units with their weights, computing exactly what plain torch would."""
