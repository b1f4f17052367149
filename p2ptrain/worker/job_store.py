"""What this device has of one job across generations, for itself and for others to read.

    the stages that run, or ran last
    snapshots of own stages, backups of others, parts fetched for a generation to come: all of
        them by version and units

A stage that runs is written to, so no version of it is read; snapshots and stopped stages are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.logs import get_logger
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.checksums import find_damaged
from p2ptrain.state.snapshot_store import SnapshotStore, StoredTensors
from p2ptrain.state.transfer_server import (
    AVERAGES,
    STAGE,
    WEIGHTS,
    Check,
    TransferServer,
    version_of,
)
from p2ptrain.worker.hosted_stages import HostedStages

log = get_logger(__name__)


class JobStore:
    """See the module. For the event loop alone.

    Attributes:
        hosted: the stages of the generation that runs here or, stopped, ran last.
        check: what the job's tensors look like, once a generation has been prepared here.
    """

    def __init__(
        self, job: str, states: TransferServer, on_damage: Callable[[Version], None]
    ) -> None:
        """Nothing is there yet.

        Args:
            states: through which it is read.
            on_damage: called when something of a version does not fit its digest (`look`).
        """
        self.hosted: HostedStages | None = None
        self.check: Check | None = None
        self._job = job
        self._states = states
        self._on_damage = on_damage
        self._is_running = False
        self._versions: SnapshotStore | None = None
        states.serve(job, self._part, self._damaged)

    def versions(self, description: ModelDescription) -> SnapshotStore:
        """Everything but what is trained; `description` is the job's."""
        if self._versions is None:
            self._versions = SnapshotStore(description)
        return self._versions

    @property
    def copies(self) -> SnapshotStore | None:
        """The same; None before a generation has been prepared here."""
        return self._versions

    # -- what is read ----------------------------------------------------------------------------

    async def _part(self, source: str, first: int, end: int) -> StoredTensors | None:
        """After the update under way, if there is one: what is copied only in that is here then."""
        version, hosted = version_of(source), self.hosted
        is_now = source in (STAGE, WEIGHTS, AVERAGES)
        if hosted is not None and (is_now or self._is_running):
            await hosted.applied()
        versions = self._versions
        if hosted is not None and is_now:
            known = {} if versions is None else versions.unchanging_digests
            return StoredTensors(end, hosted.now(source, first, end), known)
        if version is None:
            return None
        if self.hosted is not None and not self._is_running:
            here = self.hosted.named_from(first, end, version)
            if here is not None:
                return StoredTensors(*here, {})
        return None if versions is None else versions.part_from(first, end, version)

    def _damaged(self, source: str) -> None:
        version = version_of(source)
        if version is not None:
            self._on_damage(version)

    def entries(self) -> tuple[StateEntry, ...]:
        """All that is here, nothing of it torn."""
        live = () if self.hosted is None else self.hosted.held()
        return live if self._versions is None else (*live, *self._versions.entries())

    async def look(self, version: Version) -> None:
        """Forget what of a version does not fit its digests any more."""
        versions = self._versions
        for entry in versions.entries() if versions is not None else ():
            part = versions.of(entry) if versions is not None else None
            if entry.version != version or part is None:
                continue
            wrong = await run_in_background(partial(find_damaged, part.tensors, part.digests))
            if wrong:
                log.error("copy_damaged", kind=entry.kind, step=version.step, tensors=wrong[:3])
                self.drop([entry])

    # -- what changes ----------------------------------------------------------------------------

    def train(self, hosted: HostedStages) -> None:
        """From now on these stages are what is trained here."""
        self.hosted, self._is_running = hosted, True
        self._ends(hosted, "training has begun")
        self._states.reopen(self._job)
        if self._versions is not None:
            self._versions.reserve(hosted.places)

    async def rest(self) -> None:
        """Stop what is trained here, so that it can be read. May be called again."""
        hosted = self.hosted
        if hosted is not None:
            await hosted.stop()
            self._is_running = False

    def drop(self, entries: Collection[StateEntry]) -> None:
        """Forget these. Those being trained have been stopped."""
        for entry in entries:
            if entry.kind is StateKind.LIVE:
                self._drop_live()
            elif self._versions is not None:
                self._versions.discard(entry)
        self._states.reopen(self._job)

    def release(self) -> None:
        """Forget everything but what is trained: that is for `end`, once it has stopped."""
        self._versions = None
        if self.hosted is not None:
            self._ends(self.hosted, "the job has ended")
        self._states.reopen(self._job)  # what was open for readers

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
            self._ends(hosted, "this device has no part any more")

    def _ends(self, hosted: HostedStages, why: str) -> None:
        """What arrived for these stages, and for those before them, is read no more."""
        self._states.arriving.end(hosted.assignment.key, why)
