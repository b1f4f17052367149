"""What summing gradients around a ring costs: 2(g-1) steps, each with a g-th part of the bytes."""

from __future__ import annotations


def ring_steps(devices: int) -> int:
    """Messages that each of so many devices sends, one after the other."""
    return 2 * (devices - 1)


def ring_bytes(devices: int, summed_bytes: float) -> float:
    """What each of them sends, and receives, where so many bytes are summed."""
    return ring_steps(devices) / devices * summed_bytes


def ring_seconds(
    devices: int, summed_bytes: float, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Until every device has the sum; the slowest link and the longest latency count."""
    return ring_bytes(devices, summed_bytes) / bytes_per_s + ring_steps(devices) * latency_s
