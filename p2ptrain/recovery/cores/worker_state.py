"""The state of one device in one job: trained stages, snapshots, broken links. Pure.

The shell reports what becomes of the stages; once it has stopped them, its report is the truth.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Sequence

from p2ptrain.recovery.cores.worker_events import AboutSeat, Applied, GradientsReady, UpdateTorn
from p2ptrain.recovery.cores.worker_instructions import (
    DeviceInstruction,
    DropState,
    OfferSnapshot,
    ReportLink,
    ReportSnapshot,
)
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version


class TrainedStages:
    """See the module. A stage is known by its first unit."""

    def __init__(self) -> None:
        """There are none yet."""
        self._held: dict[int, StateEntry] = {}
        self._catching_up: set[int] = set()  # those whose update others have applied already

    @property
    def holdings(self) -> tuple[StateEntry, ...]:
        """As LIVE ones."""
        return tuple(self._held.values())

    @property
    def are_catching_up(self) -> bool:
        """Whether an update is applied that others have."""
        return bool(self._catching_up)

    def begin(self, ranges: Sequence[tuple[int, int]], version: Version) -> None:
        """A generation begins with these units."""
        self._held = {
            first: StateEntry(first, end, version, StateKind.LIVE) for first, end in ranges
        }

    def are(self, held: Collection[StateEntry]) -> None:
        """They have been stopped, and are this."""
        self._held = {holding.first: holding for holding in held}

    def clear(self) -> None:
        """Nothing is trained here any more."""
        self._held.clear()
        self._catching_up.clear()

    def are_ready_for(self, version: Version) -> bool:
        """Whether some have the gradients that give it."""
        return any(holding.ready == version for holding in self._held.values())

    def catch_up(self, version: Version) -> None:
        """Those that are ready for it apply it now."""
        self._catching_up = {one.first for one in self._held.values() if one.ready == version}

    def commit(self, version: Version) -> bool:
        """All are to apply it; returns whether all were ready. Once only: then none is."""
        if not self._held or any(one.ready != version for one in self._held.values()):
            return False
        for first, holding in self._held.items():
            self._held[first] = dataclasses.replace(holding, ready=None)
        return True

    def note(self, event: AboutSeat, *, is_running: bool) -> bool:
        """What became of one; returns whether there is such a stage."""
        holding = self._held.get(event.first)
        if holding is None:
            return False
        match event:
            case GradientsReady(generation, first, step):
                if is_running and holding.version.step == step:
                    ready = Version(step + 1, generation)
                    self._held[first] = dataclasses.replace(holding, ready=ready)
            case Applied(_, first, version, coefficient):
                self._held[first] = dataclasses.replace(
                    holding, version=version, ready=None, coefficient=coefficient
                )
            case UpdateTorn(_, first):
                del self._held[first]
        self._catching_up.discard(event.first)
        return True


NOT_OFFERED_LIMIT = 8
"""Announced versions that are not made yet: orders come two rounds ahead, checksums take a
while."""


class HeldSnapshots:
    """See the module. What must go is returned, to be carried out.

    Attributes:
        holdings: KEPT, REPLICA and FETCHED ones.
    """

    def __init__(self) -> None:
        """There are none yet."""
        self.holdings: list[StateEntry] = []
        self._keepers: dict[tuple[int, int], str] = {}  # by units, other than the plan says
        self._not_offered: deque[Version] = deque(maxlen=NOT_OFFERED_LIMIT)

    def put(self, holding: StateEntry) -> None:
        """It is here now."""
        if holding not in self.holdings:
            self.holdings.append(holding)

    def discard(self, holding: StateEntry) -> None:
        """It is not here any more."""
        self.holdings = [copy for copy in self.holdings if copy != holding]

    def clear(self) -> None:
        """None is here any more, and no backup peer known."""
        self.holdings.clear()
        self._keepers.clear()

    def begin(self) -> None:
        """A generation begins: its plan names new backup peers."""
        self._keepers.clear()

    # -- what goes -------------------------------------------------------------------------

    def drop(
        self, kinds: Collection[StateKind], *, but: Collection[Version | None] = ()
    ) -> list[DeviceInstruction]:
        """Free what is of these kinds, except these versions."""
        return self._remove([c for c in self.holdings if c.kind in kinds and c.version not in but])

    def keep_only(self, versions: Collection[Version]) -> list[DeviceInstruction]:
        """Free what is older than the newest of them; a younger copy may be on its way to count."""
        newest = max(version.age for version in versions)
        old = [
            copy
            for copy in self.holdings
            if copy.kind in (StateKind.KEPT, StateKind.REPLICA)
            and copy.version.age < newest
            and copy.version not in versions
        ]
        return self._remove(old)

    def _remove(self, gone: list[StateEntry]) -> list[DeviceInstruction]:
        if not gone:
            return []
        self.holdings = [copy for copy in self.holdings if copy not in gone]
        return [DropState(tuple(gone))]

    # -- messages to others ----------------------------------------------------------------

    def keep_to_itself(self, version: Version) -> None:
        """Of this version only this device's own copies are wanted, for a device that reads
        them."""
        self._not_offered.append(version)

    def offer(
        self, running: Placement, first: int, end: int, version: Version
    ) -> list[DeviceInstruction]:
        """An own copy stands: its backup peer should have it, or, where there is none, it
        counts."""
        if version in self._not_offered:
            return []
        keeper = self._keepers.get((first, end)) or running.keeper_of(first, end)
        if keeper is not None:
            return [OfferSnapshot(keeper, running.generation, first, end, version)]
        if running.protects:
            return [ReportSnapshot(running.holder, running.generation, first, end, version)]
        return []

    def offer_to(
        self, keeper: str, running: Placement, first: int, end: int, version: Version
    ) -> list[DeviceInstruction]:
        """Copies of units [first, end) go to another backup peer from now on, the present one
        too."""
        self._keepers[first, end] = keeper
        if StateEntry(first, end, version, StateKind.KEPT) not in self.holdings:
            return []
        return self.offer(running, first, end, version)


class PartnerLinks:
    """See the module.

    Args:
        device: own id.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._broken: set[str] = set()  # peers

    def begin(self) -> None:
        """A generation begins: what broke before is known."""
        self._broken.clear()

    def ended(self, running: Placement, peer: str) -> list[DeviceInstruction]:
        """The link to `peer` broke. The holder sees its own links."""
        if running.holder in (peer, self._device) or peer not in running.partners_of(self._device):
            return []
        self._broken.add(peer)
        return [ReportLink(running.holder, running.generation, peer)]

    def started(self, running: Placement, peer: str) -> list[DeviceInstruction]:
        """There is a link to `peer`, perhaps again."""
        if peer not in self._broken:
            return []
        self._broken.discard(peer)
        return [ReportLink(running.holder, running.generation, peer, back=True)]
