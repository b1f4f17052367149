"""The copies that one device has beside what it trains, and where its own are offered. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from p2ptrain.training.recovery.device_instructions import (
    DeviceInstruction,
    Drop,
    Offer,
    TellReplica,
)
from p2ptrain.training.recovery.holdings import Holding, Kind
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.recovery.version import Version

NOT_OFFERED_LIMIT = 8
"""Versions told of that are not made yet: orders come two rounds ahead, checksums take a while."""


class Copies:
    """See the module. What must go is returned, to be carried out.

    Attributes:
        holdings: KEPT, REPLICA and FETCHED ones.
    """

    def __init__(self) -> None:
        """There are none yet."""
        self.holdings: list[Holding] = []
        self._keepers: dict[tuple[int, int], str] = {}  # by units, other than the plan says
        self._not_offered: deque[Version] = deque(maxlen=NOT_OFFERED_LIMIT)

    def put(self, holding: Holding) -> None:
        """It is here now."""
        if holding not in self.holdings:
            self.holdings.append(holding)

    def discard(self, holding: Holding) -> None:
        """It is not here any more."""
        self.holdings = [copy for copy in self.holdings if copy != holding]

    def clear(self) -> None:
        """None is here any more, and no keeper known."""
        self.holdings.clear()
        self._keepers.clear()

    def begin(self) -> None:
        """An epoch begins: its plan names keepers anew."""
        self._keepers.clear()

    # -- what goes -------------------------------------------------------------------------

    def drop(
        self, kinds: Collection[Kind], *, but: Collection[Version | None] = ()
    ) -> list[DeviceInstruction]:
        """Free what is of these kinds, except these versions."""
        return self._remove([c for c in self.holdings if c.kind in kinds and c.version not in but])

    def keep_only(self, versions: Collection[Version]) -> list[DeviceInstruction]:
        """Free what is older than the newest of them; a younger copy may be on its way to count."""
        newest = max(version.age for version in versions)
        old = [
            copy
            for copy in self.holdings
            if copy.kind in (Kind.KEPT, Kind.REPLICA)
            and copy.version.age < newest
            and copy.version not in versions
        ]
        return self._remove(old)

    def _remove(self, gone: list[Holding]) -> list[DeviceInstruction]:
        if not gone:
            return []
        self.holdings = [copy for copy in self.holdings if copy not in gone]
        return [Drop(tuple(gone))]

    # -- what others hear ------------------------------------------------------------------

    def keep_to_itself(self, version: Version) -> None:
        """Of this version only this device's own copies are wanted, for somebody who reads them."""
        self._not_offered.append(version)

    def offer(
        self, running: Placed, first: int, end: int, version: Version
    ) -> list[DeviceInstruction]:
        """An own copy stands: its keeper should have it, or, where nobody keeps it, it counts."""
        if version in self._not_offered:
            return []
        keeper = self._keepers.get((first, end)) or running.keeper_of(first, end)
        if keeper is not None:
            return [Offer(keeper, running.epoch, first, end, version)]
        if running.protects:
            return [TellReplica(running.holder, running.epoch, first, end, version)]
        return []

    def offer_to(
        self, keeper: str, running: Placed, first: int, end: int, version: Version
    ) -> list[DeviceInstruction]:
        """Copies of units [first, end) go to another keeper from now on, the present one too."""
        self._keepers[first, end] = keeper
        if Holding(first, end, version, Kind.KEPT) not in self.holdings:
            return []
        return self.offer(running, first, end, version)
