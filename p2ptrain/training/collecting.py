"""Keeping another device's copies: read at leisure, checked, put in place of older ones.

    offer ──► manifest ──► what has not changed stays ──► one short read after the other,
                                                           spread until the next offer is due

A copy counts only once all of it is here and fits its checksums.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.errors import PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Priority
from p2ptrain.training.budget import available_memory_bytes, is_out_of_memory
from p2ptrain.training.digests import CHUNK_BYTES, Digest
from p2ptrain.training.fetching import version_source
from p2ptrain.training.job_store import JobStore
from p2ptrain.training.recovery import device_events as rules
from p2ptrain.training.recovery import device_instructions as to_do
from p2ptrain.training.recovery.cadence import REPLAY_LIMIT_SECONDS
from p2ptrain.training.recovery.holdings import Kind
from p2ptrain.training.state_reading import Pace, StateReading, StateRequest
from p2ptrain.training.state_transfer import Check
from p2ptrain.training.versions import Named, VersionStore

log = get_logger(__name__)

PACED_SHARE = 0.05
"""Of the time between two offers: what dies meanwhile goes back to the version before. Evenly, but
early: later reads cost as much as sooner ones."""
PACED_LIMIT_SECONDS = PACED_SHARE * REPLAY_LIMIT_SECONDS
"""Most of it: after a long pause in training the next copy would take longer than it is awaited."""

READ_SECONDS = 0.1
"""Of link time in one read: what waits in the network's own queues holds up heartbeats too."""
READ_LIMIT_BYTES = 2 << 20
"""Larger: fewer requests, each of which costs as much as some 100 KiB. Smaller: a tensor for
training finds less before it at the reader, which takes milliseconds for it while it computes."""

_Units = tuple[int, int]


class Pacing:
    """When reads are due, so that they spread evenly over a time. Pure: time is an argument."""

    def __init__(self, begun: float, seconds: float) -> None:
        self._begun = begun
        self._seconds = seconds
        self._total_bytes = 0

    def wait_seconds(self, left_bytes: int, now: float) -> float:
        """How long the next read waits, when `left_bytes` have to be read, its own included."""
        self._total_bytes = max(self._total_bytes, left_bytes)
        done = 1 - left_bytes / self._total_bytes if self._total_bytes else 1.0
        return max(self._begun + done * self._seconds - now, 0.0)


def paced_seconds(since_last: float) -> float:
    """How long to read a copy, so many seconds after the one before was offered."""
    return min(PACED_SHARE * since_last, PACED_LIMIT_SECONDS)


def read_bytes(bytes_per_s: float | None) -> int:
    """How much is read at once from a device whose last read came at that rate."""
    wanted = READ_SECONDS * (bytes_per_s or 0.0)
    return min(max(int(wanted), CHUNK_BYTES), READ_LIMIT_BYTES)


class Collecting:
    """The copies that this device reads for others; one at a time of any stage."""

    def __init__(
        self,
        mesh: Mesh,
        job: str,
        store: JobStore,
        tell: Callable[[rules.DeviceEvent], None],
    ) -> None:
        """Nothing is read yet.

        Args:
            store: where copies go.
            tell: hears `ReplicaWhole` or `CopyFailed` of each.
        """
        self._mesh = mesh
        self._job = job
        self._store = store
        self._tell = tell
        self._clock = asyncio.get_running_loop().time
        self._offered: dict[_Units, float] = {}  # when the newest offer of each stage came
        self._rates: dict[str, float] = {}  # bytes/s of the last read of a chunk or more, by owner
        self._tasks: dict[_Units, asyncio.Task[None]] = {}

    def collect(self, order: to_do.Collect, nbytes: int) -> None:
        """Read a copy of `nbytes`; what is being read of an older one is given up."""
        units = (order.first, order.end)
        under_way = self._tasks.pop(units, None)
        if under_way is not None:
            under_way.cancel()
        now, before = self._clock(), self._offered.get(units)
        self._offered[units] = now
        seconds = 0.0 if before is None else paced_seconds(now - before)
        work = self._collect(order, nbytes, Pacing(now, seconds))
        task = asyncio.create_task(work, name=f"collect units {order.first} to {order.end}")
        self._tasks[units] = task
        task.add_done_callback(partial(self._ended, units))

    async def stop(self) -> None:
        """Read nothing any more."""
        tasks = list(self._tasks.values())
        self._offered.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, units: _Units, task: asyncio.Task[None]) -> None:
        if self._tasks.get(units) is task:
            del self._tasks[units]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("copy_not_kept", units=units, exc_info=error)

    async def _collect(self, order: to_do.Collect, nbytes: int, pacing: Pacing) -> None:
        try:
            await self._read(order, nbytes, pacing)
        except (PeerError, TimeoutError, RuntimeError, MemoryError) as error:
            if not isinstance(error, (PeerError, TimeoutError)) and not is_out_of_memory(error):
                raise
            reason = "not enough memory" if is_out_of_memory(error) else str(error) or "too slow"
            log.info("copy_failed", step=order.version.step, why=reason)
            place = (order.epoch, order.first, order.end, order.version)
            self._tell(rules.CopyFailed(*place, reason))
        else:
            if failpoints.armed:
                await failpoints.reach("replica.whole.before", device=self._mesh.self_id)
            self._tell(rules.ReplicaWhole(order.epoch, order.first, order.end, order.version))

    async def _read(self, order: to_do.Collect, nbytes: int, pacing: Pacing) -> None:
        place = (Kind.REPLICA, order.first, order.end)
        check, versions = self._store.check, self._store.copies
        if check is None or versions is None:
            raise PeerError(f"{self._mesh.name} has no part in that job")
        slot = versions.slot(*place) or {}
        self._make_sure_of_memory(nbytes, slot)
        reading = self._reading(versions, order, check, slot, self._paced(order.owner, pacing))
        request = StateRequest(
            order.owner,
            self._job,
            version_source(order.version),
            order.first,
            order.end,
            priority=Priority.REPLICA,
            range_bytes=lambda: read_bytes(self._rates.get(order.owner)),
            reads_in_flight=1,
        )
        await reading.read_from(request)
        state = reading.state()
        lacking = versions.lacking(order.first, order.end, state.tensors)
        if lacking:
            raise PeerError(f"the copy lacks {', '.join(lacking[:3])}")
        versions.put(*place, order.version, state.tensors, state.digests)
        self._store.offer(order.version)

    def _reading(
        self,
        versions: VersionStore,
        order: to_do.Collect,
        check: Check,
        slot: Named,
        pace: Pace,
    ) -> StateReading:
        """What is here of the same stage at another version need not come again."""
        known: dict[str, tuple[Tensor, Digest]] = {}
        for holding in versions.holdings():
            here = versions.of(holding)
            units = (holding.kind, holding.first, holding.end)
            if here is not None and units == (Kind.REPLICA, order.first, order.end):
                known |= {
                    name: (tensor, here.digests[name])
                    for name, tensor in here.tensors.items()
                    if name in here.digests
                }
        return StateReading(self._mesh, check, known=known, slot=slot, pace=pace)

    def _make_sure_of_memory(self, nbytes: int, slot: Named) -> None:
        """Where the kernel gives away more than it has, taking it would end this process."""
        needed = nbytes - sum(tensor.nbytes for tensor in slot.values())
        if needed > 0 and needed > available_memory_bytes():
            raise PeerError(f"{self._mesh.name} has no {needed >> 20} MiB free for a copy")

    def _paced(self, owner: str, pacing: Pacing) -> Pace:
        begun, left_before = 0.0, 0

        async def pace(left_bytes: int) -> None:
            nonlocal begun, left_before
            read = left_before - left_bytes
            if read >= CHUNK_BYTES:  # what is smaller takes as long as a message does
                self._rates[owner] = read / max(self._clock() - begun, 1e-6)
            if failpoints.armed:
                await failpoints.reach("replica.read.between", device=self._mesh.self_id)
            seconds = pacing.wait_seconds(left_bytes, self._clock())
            if seconds:
                await asyncio.sleep(seconds)
            begun, left_before = self._clock(), left_bytes

        return pace
