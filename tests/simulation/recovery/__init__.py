"""The rules of recovery in a simulated household that loses devices, links, coordinators."""
