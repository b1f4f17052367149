"""What training is in the simulator: hashes, and what they must be.

Unit u at version t is a number. One round sends a number forward through all units and back:

    f(u) = H(f(u - 1), state(u))        b(u) = H(b(u + 1), f(u), state(u))
    state'(u) = H(state(u), b(u), salt)

so every unit's next state depends on every unit's present one and on the step. A mix of versions,
an update left out or made twice gives other numbers for ever. In a group the salt is the
generation's number: groups of different generations add in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.version import Version


class InvariantViolated(AssertionError):
    """The message says which, where and when."""


_PACKS = [Struct(f"<{count}Q").pack for count in range(4)]


def mix(*values: int) -> int:
    """A number that depends on all of them and on their order."""
    data = _PACKS[len(values)](*values)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def forward(value: int, states: Sequence[int]) -> list[int]:
    """f of each unit, from what came from the unit before."""
    found = []
    for state in states:
        value = mix(value, state)
        found.append(value)
    return found


def backward(value: int, forwards: Sequence[int], states: Sequence[int]) -> list[int]:
    """b of each unit, from what came from the unit after."""
    found = []
    for came, state in zip(reversed(forwards), reversed(states), strict=True):
        value = mix(value, came, state)
        found.append(value)
    return found[::-1]


class Truth:
    """What every unit of every version must be, worked out from the generations that began."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.first = Version(0, 0)
        self._known: dict[Version, tuple[int, ...]] = {
            self.first: tuple(mix(unit) for unit in range(units))
        }
        self._epochs: dict[int, Placement] = {}

    def began(self, placed: Placement) -> None:
        """The holder's journal has this generation."""
        self._epochs[placed.generation] = placed

    def of(self, version: Version) -> tuple[int, ...]:
        """By unit.

        Raises:
            InvariantViolated: no generation that began can have computed it.
        """
        known = self._known.get(version)
        if known is None:
            placed = self._epochs.get(version.computed)
            if placed is None or version.step <= placed.version.step:
                raise InvariantViolated(f"{version} was never computed")
            before = Version(version.step - 1, version.computed)
            if before.step == placed.version.step:
                before = placed.version
            known = self._known[version] = self._updated(placed, before.step, self.of(before))
        return known

    def _updated(self, placed: Placement, step: int, states: tuple[int, ...]) -> tuple[int, ...]:
        forwards = forward(mix(step), states)
        backwards = backward(mix(forwards[-1], step), forwards, states)
        found = list(states)
        for stage in placed.stages:
            salt = placed.generation if len(stage.devices) > 1 else 0
            for unit in range(stage.first, stage.end):
                found[unit] = mix(states[unit], backwards[unit], salt)
        return tuple(found)
