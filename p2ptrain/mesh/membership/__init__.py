"""SWIM with Lifeguard."""
