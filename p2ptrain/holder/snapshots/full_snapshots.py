"""Full snapshots on the holder, for the case that devices die with all copies of a stage.

Global replication (FTPipeHD, III-E): now and then the snapshots of all stages come to the holder.
So they do where another device, such as one with a fast card, has the whole model by itself; once
several have it, and copies of each other's stages, what came of it goes.

    a version kept everywhere ──► stable ──► all of it read, in the lowest lane ──► in memory

Only the newest is kept. The newest checkpoints serve the same purpose: they are read from the disk,
stage by stage, only if the devices that died had what no other device has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.errors import OptionError, PeerError
from p2ptrain.holder.snapshots.checkpointer import Gather
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.logs import get_logger
from p2ptrain.process.memory_budget import is_out_of_memory, usable_memory_bytes
from p2ptrain.recovery.choose_version import FullSnapshot
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.state.checkpoint_files import KEPT, WrittenCheckpoint, load_written
from p2ptrain.state.snapshot_store import Named, StoredTensors, as_laid_out, tensors_of_units
from p2ptrain.state.transfer_server import TransferServer

log = get_logger(__name__)

MAX_AT_ONCE = 2
"""One is held, and a newer one comes."""

MEMORY_SHARE = 0.5
"""Of what is free when one is made, while the one before is still held."""


def whole_copies(
    device: str,
    held: Collection[Version],
    first: Version,
    round_seconds: float | None,
    settings: RecoverySettings = HOME,
) -> tuple[FullSnapshot, ...]:
    """Whole copies on this device that training could go on from.

    Args:
        device: own id.
        held: the versions that this device has all of.
        first: what the job began with: as soon as copies should be there it is one no more.
        round_seconds: None = it always is one.
    """
    found = [FullSnapshot(v, device, StateKind.GLOBAL) for v in held if v != first]
    if first in held:
        most = None
        if round_seconds:
            most = max(1, int(settings.first_weights_replay_seconds / round_seconds))
        found.append(FullSnapshot(first, device, StateKind.INITIAL, most))
    return tuple(found)


class FullSnapshots:
    """See the module. One a job, in its event loop; `close` it.

    Args:
        states: offers what is held.
        wants: (version taken last, version) -> whether it is taken; None: each is, for as long as
            another device has the whole model.
        is_elsewhere: whether one has.
        warn: warns the user once that there is not enough memory.

    Attributes:
        reading: the version of which stages' copies are still needed.
        held: the version in memory; None before the first.
    """

    def __init__(
        self,
        states: TransferServer,
        job: str,
        prepared: PreparedJob,
        gather: Gather,
        wants: Callable[[int, int], bool] | None,
        is_elsewhere: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self.reading: Version | None = None
        self._states = states
        self._job = job
        self._description = prepared.captured.description
        self._gather = gather
        self._wants, self._is_elsewhere = wants, is_elsewhere
        self._last_step = prepared.first_step
        self._size_bytes = prepared.whole_bytes
        self._warn = warn
        self._has_warned = False
        self.held: Version | None = None
        self._is_paused = False
        self._tasks = TaskOwner(_on_failed)
        self._taking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A generation begins."""
        self._is_paused = False

    def pause(self) -> None:
        """A generation ends: what is held now may be resumed from, and is not replaced."""
        self._is_paused = True
        if self._taking is not None:
            self._taking.cancel()
            self.reading = None

    def stable(self, version: Version) -> None:
        """Every stage has copies of a version: read it, if it is one of those."""
        if self._is_paused or self.reading is not None:
            return
        if self._wants is None and not self._is_elsewhere():
            self._replace(None)
            return
        if self._wants is not None and not self._wants(self._last_step, version.step):
            return
        if self._size_bytes > MEMORY_SHARE * usable_memory_bytes():
            self._short()
            return
        self.reading, self._last_step = version, version.step
        name = f"copy all of version {version.step}"
        self._taking = self._tasks.spawn(self._take(version), name)

    async def close(self) -> None:
        """Read no more."""
        await self._tasks.cancel()

    async def _take(self, version: Version) -> None:
        try:
            state = await self._gather(version)
        except (PeerError, TimeoutError) as error:
            log.info("no_whole_copy", step=version.step, why=str(error) or "too slow")
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._short()
            return
        finally:
            self.reading = None

        async def units(first: int, end: int) -> StoredTensors:
            return StoredTensors.whole(end, tensors_of_units(self._description, state, first, end))

        self._states.hold(self._job, version, units)
        self._replace(version)
        log.info("whole_copy", step=version.step)

    def _replace(self, version: Version | None) -> None:
        old, self.held = self.held, version
        if old is not None:
            self._states.let_go(self._job, old)

    def _short(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                "too little memory here for a copy of the whole model: if the device that has it "
                "fails, or several do at once, training may go back further"
            )


def _on_failed(work: str, error: BaseException) -> None:
    log.error("no_whole_copy", work=work, exc_info=error)


class CheckpointSnapshots:
    """See the module. Held by `states` from the first `take` on; what cannot be read is let go.

    As many as are kept on the disk: one that others are reading is not taken away by the next.

    Args:
        warn: warns the user of one that cannot be read.
    """

    def __init__(
        self,
        states: TransferServer,
        job: str,
        prepared: PreparedJob,
        warn: Callable[[str], None],
    ) -> None:
        self._versions: list[Version] = []  # all on the disk, the newest last
        self._warn = warn
        self._states = states
        self._job = job
        self._description = prepared.captured.description
        self._first = prepared.state

    def take(self, version: Version, written: WrittenCheckpoint) -> None:
        """A newer one is whole."""
        self._versions.append(version)
        self._states.hold(self._job, version, partial(self._units, version, written))
        for old in self._versions[:-KEPT]:
            self._let_go(old)

    def _let_go(self, version: Version) -> None:
        if version in self._versions:
            self._versions.remove(version)
            self._states.let_go(self._job, version)

    async def _units(
        self, version: Version, of: WrittenCheckpoint, first: int, end: int
    ) -> StoredTensors:
        try:
            named = await run_in_background(partial(self._read, of, first, end))
            return StoredTensors.whole(end, named)
        except OptionError as error:
            log.error("checkpoint_not_read", why=str(error))
            if version in self._versions:
                self._warn(f"{error}: going back to an older state, if there is one")
            self._let_go(version)
            raise PeerError(str(error)) from error

    def _read(self, written: WrittenCheckpoint, first: int, end: int) -> Named:
        """For seconds: in a thread, or this device says nothing meanwhile and is taken for dead."""
        names = frozenset(self._description.state_names(first, end))
        found = load_written(written, names.__contains__)
        return {name: as_laid_out(self._first, name, tensor) for name, tensor in found.items()}
