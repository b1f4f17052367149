"""How long a holder waits after a sign of trouble until it is known what happened.

A broken link is waited for, and may turn out a death; a round that broke off without a sign gets a
moment for one to come. Where none comes it is only repeated, and not for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from p2ptrain.training.recovery.reach import RELINK_SECONDS

SETTLE_SECONDS = 6.0
"""Longest wait for a verdict on a link of our own; membership takes 4.2 s for the silent.

Links between two others get RELINK_SECONDS: who cannot reach whom by then is planned around.
"""
VERDICT_SECONDS = 3.0
"""A stage only sees a dead link; so long the mesh has to find out who is gone."""
MOST_FRUITLESS = 5
"""Epochs in a row that broke off without a new step, and nobody knows why."""

Pair: TypeAlias = frozenset[str]


class Settling:
    """See the module. Times are those of the core that asks.

    Attributes:
        without: devices that stood still twice in a row: they get no work until they come anew.
    """

    def __init__(self, holder: str) -> None:
        self.without: set[str] = set()
        self._holder = holder
        self._broken: dict[Pair, float] = {}  # links, and until when to wait for each
        self._unexplained: tuple[str, float] | None = None  # what broke off, and until when
        self._fruitless = 0
        self._standstills = 0

    @property
    def due(self) -> float:
        """When everything is known or not waited for any more; in the past, if it is so now."""
        until = float("-inf") if self._unexplained is None else self._unexplained[1]
        return max([until, *self._broken.values()])

    def link_broke(self, one: str, other: str, now: float) -> None:
        """Between two devices that are alive."""
        patience = SETTLE_SECONDS if self._holder in (one, other) else RELINK_SECONDS
        self._broken.setdefault(frozenset((one, other)), now + patience)
        self._unexplained = None

    def link_back(self, one: str, other: str) -> None:
        """It is there again."""
        self._broken.pop(frozenset((one, other)), None)

    def died(self, device: str, *, in_plan: bool) -> None:
        """Nobody waits for its links; that the plan had it explains much."""
        for pair in [pair for pair in self._broken if device in pair]:
            del self._broken[pair]
        self.without.discard(device)
        if in_plan:
            self._unexplained = None

    def broke_off(self, reason: str, now: float) -> None:
        """A round cannot go on, and nothing has been heard that explains it."""
        if not self._broken:
            self._unexplained = (reason, now + VERDICT_SECONDS)

    def stood_still(self, devices: Collection[str]) -> None:
        """Nothing moved anywhere, and these devices were not done."""
        self._standstills += 1
        if self._standstills > 1:
            self.without.update(set(devices) - {self._holder})

    def over(self) -> str | None:
        """It is asked for a new epoch. Returns why that is of no use, where it is not."""
        self._broken.clear()
        unexplained, self._unexplained = self._unexplained, None
        if unexplained is None:
            return None
        self._fruitless += 1
        return unexplained[0] if self._fruitless > MOST_FRUITLESS else None

    def progress(self) -> None:
        """A new step was made."""
        self._fruitless = self._standstills = 0
