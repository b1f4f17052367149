"""Which weights mini-batches see in asynchronous running, and how many versions that keeps."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Weights(StrEnum):
    """Which weights a mini-batch's forward and backward use; `training.asynchronous.delays`."""

    STASHED = "stashed"
    """The newest at its forward (PipeDream's weight stashing)."""
    VERTICAL = "vertical"
    """Those of one version in all stages (PipeDream's vertical sync)."""
    DOUBLE = "double"
    """Those of one update ago in all stages (PipeDream-2BW's double buffering)."""
    UNSTASHED = "unstashed"
    """The newest at its forward, and others at its backward."""


def depths_of(devices: Sequence[int]) -> tuple[int, ...]:
    """Mini-batches in flight at stages of so many devices each: K_p."""
    return tuple(sum(devices[p:]) for p in range(len(devices)))


def updates_late(weights: Weights, in_flight: int, noam: int) -> int:
    """By how many updates the weights of a mini-batch's forward are old at a stage.

    Args:
        in_flight, noam: as of `versions_kept`.
    """
    match weights:
        case Weights.STASHED | Weights.UNSTASHED:
            return in_flight - 1
        case Weights.VERTICAL:
            return noam - 1
        case Weights.DOUBLE:
            return min(noam - 1, 1)


def versions_kept(weights: Weights, in_flight: int, noam: int) -> int:
    """Most versions that a stage keeps at a time, the newest included.

    Args:
        in_flight: mini-batches between forward and backward there; n-p in a straight pipeline.
        noam: the same of the first stage; n.
    """
    match weights:
        case Weights.STASHED:
            return in_flight
        case Weights.VERTICAL:
            return noam
        case Weights.DOUBLE:
            return min(noam, 2)
        case Weights.UNSTASHED:
            return 1
