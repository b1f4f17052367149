"""What goes wrong, with whom and when: decided here, without a clock and from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

LEAST_DEVICES = 3
"""So many stay untouched at any time, the data holder among them."""


class Kind(StrEnum):
    """A misfortune."""

    KILL = "kill"
    """SIGKILL; started again after a while, as `join`."""
    FREEZE = "freeze"
    """All its processes stand still for a while."""
    UNPLUG = "unplug"
    """Its cable is out for a while."""


@dataclass(frozen=True, slots=True)
class Misfortune:
    """One device's.

    Attributes:
        seconds: until it is over: the device is started again, thawed or plugged in.
    """

    kind: Kind
    device: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {self.device} for {self.seconds:.0f} s"


class Fate:
    """Deals misfortunes, of every kind as many.

    Args:
        devices: that may be hit: not the one with the data.
        shortest, longest: seconds of one.
    """

    def __init__(
        self, devices: Collection[str], seed: int, *, shortest: float = 2.0, longest: float = 15.0
    ) -> None:
        self._devices = sorted(devices)
        self._limits = shortest, longest
        self._chance = random.Random(seed)
        self._kinds = self._dealt()

    def next(self, hit: Collection[str]) -> Misfortune | None:
        """The next one, on no device that is `hit` already; None where too few are left."""
        well = [device for device in self._devices if device not in hit]
        if len(well) < LEAST_DEVICES:
            return None
        device = self._chance.choice(well)
        return Misfortune(next(self._kinds), device, self._chance.uniform(*self._limits))

    def _dealt(self) -> Iterator[Kind]:
        while True:
            kinds = list(Kind)
            self._chance.shuffle(kinds)
            yield from kinds
