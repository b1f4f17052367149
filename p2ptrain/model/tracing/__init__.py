"""what a trace would take wrongly without a word."""
