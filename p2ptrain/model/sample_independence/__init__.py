"""what dividing a micro-batch would change."""
