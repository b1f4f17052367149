"""What a household can do, and plans for it."""
