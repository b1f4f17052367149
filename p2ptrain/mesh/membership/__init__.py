"""Which members are alive: SWIM with Lifeguard."""
