"""What this device has of one job across generations, and what of it others may read.

    the stages that run, or ran last             the first weights, on the device with the data
    snapshots of own stages, backups of others   all of them by version and units
    parts fetched for a generation to come

A stage that runs is written to, so no device reads it; snapshots and stopped stages can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from p2ptrain.aio.threads import run_in_background
from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.wire.tensor_codec import copy_into
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.checksums import ChecksumMismatch, Digest, find_damaged
from p2ptrain.state.fetch import version_source
from p2ptrain.state.snapshot_store import Named, SnapshotStore, StoredTensors
from p2ptrain.state.transfer_server import (
    AVERAGES,
    STAGE,
    WEIGHTS,
    After,
    Check,
    KnownDigests,
    Source,
    TransferServer,
    at_once,
    in_memory,
    none_known,
)
from p2ptrain.worker.hosted_stages import HostedStages

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """Tensors of some units that are here.

    Attributes:
        digests: of the tensors, as far as they were taken.
        stays: names of those that must stay as they are.
    """

    tensors: dict[str, Tensor]
    digests: dict[str, Digest]
    stays: frozenset[str]

    def own(self) -> dict[str, Tensor]:
        """The same, to be trained on: what must stay is copied. For the compute thread.

        Raises:
            ChecksumMismatch: some have changed since their digests were taken.
        """
        wrong = find_damaged(self.tensors, self.digests)
        if wrong:
            raise ChecksumMismatch(f"{', '.join(wrong[:3])} changed in memory")
        return {
            name: copy_into(None, tensor) if name in self.stays else tensor
            for name, tensor in self.tensors.items()
        }


class JobStore:
    """See the module. For the event loop alone.

    Attributes:
        hosted: the stages of the generation that runs here or, stopped, ran last.
        check: what the job's tensors look like, once a generation has been prepared here.
    """

    def __init__(
        self,
        job: str,
        states: TransferServer,
        device: str,
        on_damage: Callable[[Version], None],
    ) -> None:
        """Nothing is there yet.

        Args:
            states: what others read from.
            device: own name, for messages.
            on_damage: called when something of a version does not fit its digest (`look`).
        """
        self.hosted: HostedStages | None = None
        self.check: Check | None = None
        self._job = job
        self._states = states
        self._device = device
        self._on_damage = on_damage
        self._is_running = False
        self._versions: SnapshotStore | None = None
        self._offered: set[str] = set()

    def versions(self, description: ModelDescription) -> SnapshotStore:
        """Everything but what is trained; `description` is the job's."""
        if self._versions is None:
            self._versions = SnapshotStore(description)
        return self._versions

    @property
    def copies(self) -> SnapshotStore | None:
        """The same; None before a generation has been prepared here."""
        return self._versions

    # -- what others may read --------------------------------------------------------------------

    def offer(self, version: Version) -> None:
        """Let others read what is here of that version, after the update under way if there is one.

        What of it is copied only in that update is here then.
        """

        async def tensors(first: int, end: int) -> Named:
            return (await self.find(version, first, end)).tensors

        digests = partial(self._digests, version)
        self._serve(version_source(version), tensors, self._settled, digests, version)

    def withdraw(self) -> None:
        """Nothing can be read any more, but what the holder itself offers."""
        self._states.retract(self._job, self._offered)
        self._offered.clear()

    async def _settled(self) -> None:
        if self._is_running and self.hosted is not None:
            await self.hosted.applied()

    def _serve(
        self,
        source: str,
        tensors: Source,
        after: After = at_once,
        digests: KnownDigests = none_known,
        version: Version | None = None,
    ) -> None:
        self._offered.add(source)
        tell = partial(self._on_damage, version) if version is not None else _nothing
        self._states.offer(self._job, source, tensors, after, digests=digests, on_damage=tell)

    # -- what is here ----------------------------------------------------------------------------

    async def find(self, version: Version, first: int, end: int) -> FoundTensors:
        """The tensors of units [first, end) at `version`, from wherever they are here.

        What is on the disk alone is read in a thread: it may take longer than others wait for a
        sign of life.

        Raises:
            PeerError: some are not here.
        """
        found = FoundTensors({}, {}, frozenset())
        unit = first
        while unit < end:
            part = self._from(version, unit, end) or await self._whole(version, unit, end)
            new = {n: t for n, t in part.tensors.items() if n not in found.tensors}
            found = FoundTensors(
                found.tensors | new,
                found.digests | {n: part.digests[n] for n in new if n in part.digests},
                found.stays | self._staying(part.kind, new),
            )
            unit = part.end
        return found

    def _unchanging_digests(self, _first: int, _end: int) -> Mapping[str, Digest]:
        return {} if self._versions is None else self._versions.unchanging_digests

    def _staying(self, kind: StateKind, tensors: Named) -> frozenset[str]:
        """Those of `tensors` that must not be trained on; a user's own module is the user's."""
        if kind in (StateKind.LIVE, StateKind.FETCHED):
            return frozenset()
        if kind in (StateKind.KEPT, StateKind.REPLICA) and self._versions is not None:
            return frozenset(tensors) - self._versions.unchanging
        return frozenset(tensors)

    def _from(self, version: Version, unit: int, end: int) -> StoredTensors | None:
        if self.hosted is not None and not self._is_running:
            here = self.hosted.named_from(unit, end, version)
            if here is not None:
                return StoredTensors(here[0], StateKind.LIVE, here[1], {})
        return self._versions.part_from(unit, end, version) if self._versions is not None else None

    async def _whole(self, version: Version, unit: int, end: int) -> StoredTensors:
        whole = await self._states.whole(self._job, version_source(version), unit, end)
        if whole is not None:
            return StoredTensors(end, StateKind.GLOBAL, whole, {})
        raise PeerError(f"{self._device} does not have layer {unit} after update {version.step}")

    def _digests(self, version: Version, first: int, end: int) -> Mapping[str, Digest]:
        """Of what `find` gives, as far as they were taken; of whole copies none are."""
        found: dict[str, Digest] = {}
        names: set[str] = set()
        unit = first
        while unit < end:
            part = self._from(version, unit, end)
            if part is None:
                break
            found |= {n: digest for n, digest in part.digests.items() if n not in names}
            names.update(part.tensors)
            unit = part.end
        return found

    async def look(self, version: Version) -> list[StateEntry]:
        """What of a version does not fit its digests any more; it is forgotten here."""
        versions, found = self._versions, []
        for entry in versions.entries() if versions is not None else ():
            part = versions.of(entry) if versions is not None else None
            if entry.version != version or part is None:
                continue
            wrong = await run_in_background(partial(find_damaged, part.tensors, part.digests))
            if wrong and versions is not None:
                log.error("copy_damaged", kind=entry.kind, step=version.step, tensors=wrong[:3])
                versions.discard(entry)
                found.append(entry)
        return found

    # -- what changes ----------------------------------------------------------------------------

    def train(self, hosted: HostedStages) -> None:
        """From now on these stages are what is trained here."""
        self.hosted, self._is_running = hosted, True
        self._states.relays.end(hosted.assignment.key, "training has begun")
        self.withdraw()
        for source, of in ((STAGE, hosted.state), (WEIGHTS, hosted.weights)):
            self._serve(source, in_memory(of), hosted.applied, self._unchanging_digests)
        self._serve(AVERAGES, in_memory(hosted.averages), hosted.applied)
        if self._versions is not None:
            self._versions.reserve(hosted.places)
            for entry in self._versions.entries():
                self.offer(entry.version)

    async def rest(self) -> tuple[StateEntry, ...]:
        """Stop what is trained here, and let others read it; what it is. May be called again."""
        hosted = self.hosted
        if hosted is None:
            return ()
        await hosted.stop()
        self._is_running = False
        held = hosted.held()
        for entry in held:
            self.offer(entry.version)
        return held

    def keep(self, entries: Collection[StateEntry]) -> None:
        """Forget the snapshots that are not among these: no device knows of them."""
        if self._versions is not None:
            for entry in self._versions.entries():
                if entry not in entries:
                    self._versions.discard(entry)

    def drop(self, entries: tuple[StateEntry, ...]) -> None:
        """Forget these. Those being trained have been stopped."""
        for entry in entries:
            if entry.kind is StateKind.LIVE:
                self._drop_live()
            elif self._versions is not None:
                self._versions.discard(entry)
        left = self._versions.entries() if self._versions is not None else ()
        gone = {h.version for h in entries} - {h.version for h in left}
        if self._is_running or self.hosted is None:
            sources = {version_source(version) for version in gone}
            self._states.retract(self._job, sources)
            self._offered -= sources

    def release(self) -> None:
        """Forget everything but what is trained: that is for `end`, once it has stopped."""
        self._versions = None
        self.withdraw()
        if self.hosted is not None:
            self._states.relays.end(self.hosted.assignment.key, "the job has ended")

    async def end(self) -> None:
        """Stop what is trained here, and forget it. No task and no tensor is left."""
        hosted = self.hosted
        if hosted is None:
            return
        await hosted.stop()
        if self.hosted is hosted:
            self.hosted, self._is_running = None, False

    def _drop_live(self) -> None:
        hosted, self.hosted = self.hosted, None
        self._is_running = False
        if hosted is not None:
            hosted.disconnect()
            why = "this device has no part any more"
            self._states.relays.end(hosted.assignment.key, why)
            self.withdraw()
            for entry in self._versions.entries() if self._versions is not None else ():
                self.offer(entry.version)


def _nothing() -> None:
    """What changes all the time has no digest to be held against."""
