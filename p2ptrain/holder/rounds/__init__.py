"""One generation's rounds: ordered, fed, collected, committed, reported."""
