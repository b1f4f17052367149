"""What crosses between devices with tiles, and what a group of units takes with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages that cross between devices at one moment, one way.

    Attributes:
        sent, received: bytes by device.
        messages: by device, at both ends together.
        waits_for: by device: those that it gets something from.
    """

    sent: tuple[float, ...]
    received: tuple[float, ...]
    messages: tuple[int, ...]
    waits_for: tuple[frozenset[int], ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing crosses."""
        return not any(self.messages)


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One group.

    Attributes:
        forward, backward: by leg, in the order of the forward: seconds by device.
        halo: at its beginning, forward, with the statistics of what enters where the group begins
            with their operator; on the way back the same turned round.
        statistics: by leg but the last: what all devices tell each other behind it.
        memory: bytes kept for the backward, by device.
        seconds: the sum, see the module.
        work: seconds that all it computes takes the reference device alone.
        repeated: part of its work that is computed more than once.
    """

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    halo: Exchange
    statistics: tuple[Exchange, ...]
    memory: tuple[float, ...]
    seconds: float
    work: float
    repeated: float
