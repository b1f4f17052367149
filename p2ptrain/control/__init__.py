"""Commands on this machine talk to the member that runs here: never reachable from outside."""
