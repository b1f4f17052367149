"""How many rounds are run, and which of them count."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.cells import Cell

WARM = 2
"""Enough for a household whose plan stays: p2ptrain's rounds overlap."""
_BY_ITSELF = ("torch", "single")


@dataclass(frozen=True, slots=True)
class Rounds:
    """`warm` rounds do not count, the `steady` ones after them do."""

    warm: int
    steady: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.warm + self.steady


def rounds_of(cell: Cell, steady: int, settle: int = WARM) -> Rounds:
    """One round warms up a single device, whose rounds are long and alike: half as many count.

    Args:
        steady: rounds that count.
        settle: rounds before those where p2ptrain may change its plan: it looks after ten.
    """
    if cell.system in _BY_ITSELF:
        return Rounds(1, max(2, steady // 2))
    return Rounds(WARM if cell.is_rival else settle, steady)
