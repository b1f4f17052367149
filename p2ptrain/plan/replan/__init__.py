"""From one plan to the next: what moves, what it costs, and when it pays."""
