"""The state of one device in one job: snapshots, broken links. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from p2ptrain.recovery.cores.worker_port import WorkerPort
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.state_report import StageCopy, StateEntry, StateKind
from p2ptrain.recovery.version import Version

NOT_OFFERED_LIMIT = 8
"""Announced versions that are not made yet: orders come two rounds ahead, checksums take a
while."""


class HeldSnapshots:
    """See the module.

    Args:
        port: where they are, and what must be done with them is done.
    """

    def __init__(self, port: WorkerPort) -> None:
        self._port = port
        self._backup_peers: dict[tuple[int, int], str] = {}  # by units, other than the plan says
        self._not_offered: deque[Version] = deque(maxlen=NOT_OFFERED_LIMIT)

    def begin(self) -> None:
        """A generation begins, and its plan names new backup peers; or the job is over."""
        self._backup_peers.clear()

    # -- what goes -------------------------------------------------------------------------

    def drop(self, kinds: Collection[StateKind], *, but: Collection[Version | None] = ()) -> None:
        """Free what is of these kinds, except these versions."""
        self._remove([c for c in self._port.entries() if c.kind in kinds and c.version not in but])

    def keep_only(self, versions: Collection[Version]) -> None:
        """Free what is older than the newest of them; a younger copy may be on its way to count."""
        newest = max(version.age for version in versions)
        old = [
            copy
            for copy in self._port.entries()
            if copy.kind in (StateKind.KEPT, StateKind.REPLICA)
            and copy.version.age < newest
            and copy.version not in versions
        ]
        self._remove(old)

    def _remove(self, gone: list[StateEntry]) -> None:
        if gone:
            self._port.drop_state(tuple(gone))

    # -- messages to others ----------------------------------------------------------------

    def keep_to_itself(self, version: Version) -> None:
        """Of this version only this device's own copies are wanted, for a device that reads
        them."""
        self._not_offered.append(version)

    def offer(self, running: Placement, first: int, end: int, version: Version) -> None:
        """An own copy stands: its backup peer should have it, or, where there is none, it
        counts."""
        if version in self._not_offered:
            return
        copy = StageCopy(running.generation, first, end, version)
        backup_peer = self._backup_peers.get((first, end)) or running.backup_peer_of(first, end)
        if backup_peer is not None:
            self._port.offer_copy(backup_peer, copy)
        elif running.protects:
            self._port.report_copy(running.holder, copy, None)

    def offer_to(self, backup_peer: str, running: Placement, copy: StageCopy) -> None:
        """Copies of those units go to another backup peer from now on, the present one too."""
        self._backup_peers[copy.first, copy.end] = backup_peer
        place = (copy.first, copy.end, copy.version)
        if StateEntry(*place, StateKind.KEPT) in self._port.entries():
            self.offer(running, *place)


class PartnerLinks:
    """See the module.

    Args:
        device: own id.
        port: where a broken one is reported.
    """

    def __init__(self, device: str, port: WorkerPort) -> None:
        self._device = device
        self._port = port
        self._broken: set[str] = set()  # peers

    def begin(self) -> None:
        """A generation begins: what broke before is known."""
        self._broken.clear()

    def ended(self, running: Placement, peer: str) -> None:
        """The link to `peer` broke. The holder sees its own links."""
        holder = running.holder
        if self._device != holder != peer and peer in running.partners_of(self._device):
            self._broken.add(peer)
            self._port.report_link(holder, running.generation, peer, back=False)

    def started(self, running: Placement, peer: str) -> None:
        """There is a link to `peer`, perhaps again."""
        if peer in self._broken:
            self._broken.discard(peer)
            self._port.report_link(running.holder, running.generation, peer, back=True)
