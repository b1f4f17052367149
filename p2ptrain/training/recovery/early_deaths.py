"""Whether a part of the model ends the devices that compute it. Pure.

A model may end any process that runs some of its units, and be harmless where it was measured. Each
device that gets these units next would die of them too, until none of the household is left. So
processes that end right after their epoch began are counted, by the units that all of them had.
"""

from __future__ import annotations

from p2ptrain.training.recovery.placed import Placed

EARLY_STEPS = 2
"""An epoch that has made so many new ones has outlived its beginning."""
MOST_DEVICES = 2
"""Devices that a part may end so."""


class EarlyDeaths:
    """See the module.

    Attributes:
        devices: those that ended so, by the present suspicion.
    """

    def __init__(self) -> None:
        self.devices: list[str] = []
        self._units: frozenset[int] = frozenset()  # of all of them
        self._placed: Placed | None = None
        self._steps = 0
        self._counted: set[str] = set()  # of the epoch

    def begun(self, placed: Placed) -> None:
        """An epoch is in force."""
        self._placed, self._steps = placed, 0
        self._counted.clear()

    def progress(self) -> None:
        """A new step was made in it."""
        self._steps += 1
        if self._steps == EARLY_STEPS:
            self._forget()

    def ended(self, device: str) -> None:
        """Its process did, for certain, and without a word."""
        placed = self._placed
        if placed is None or self._steps >= EARLY_STEPS or device in self._counted:
            return
        ranges = placed.ranges_of(device)
        units = frozenset(unit for first, end in ranges for unit in range(first, end))
        if not units:
            return
        if not units & self._units:
            self._forget()
            self._units = units
        self._units &= units
        self._counted.add(device)
        self.devices.append(device)

    @property
    def part(self) -> tuple[int, int] | None:
        """Units [first, end) that have ended too many devices; None: none have."""
        if len(self.devices) < MOST_DEVICES:
            return None
        return min(self._units), max(self._units) + 1

    def _forget(self) -> None:
        self.devices, self._units = [], frozenset()
