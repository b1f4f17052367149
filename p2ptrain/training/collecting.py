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
from p2ptrain.size_text import size_text
from p2ptrain.training.budget import available_memory_bytes, is_out_of_memory
from p2ptrain.training.digests import Digest
from p2ptrain.training.fetching import version_source
from p2ptrain.training.job_store import JobStore
from p2ptrain.training.recovery import device_events as rules
from p2ptrain.training.recovery import device_instructions as to_do
from p2ptrain.training.recovery.copy_pace import Pacing, ReadRates, paced_seconds
from p2ptrain.training.recovery.holdings import Kind
from p2ptrain.training.state_reading import Pace, StateReading, StateRequest
from p2ptrain.training.state_transfer import Check
from p2ptrain.training.versions import Named, VersionStore

log = get_logger(__name__)

_Units = tuple[int, int]


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
        self._begun = self._clock()  # the epoch
        self._offered: dict[_Units, float] = {}  # when the newest offer of each stage came
        self._rates = ReadRates()
        self._tasks: dict[_Units, asyncio.Task[None]] = {}

    def begin(self) -> None:
        """An epoch begins: its first copies are spread over a part of what passes until then."""
        self._begun = self._clock()

    def collect(self, order: to_do.Collect, nbytes: int) -> None:
        """Read a copy of `nbytes`; what is being read of an older one is given up."""
        units = (order.first, order.end)
        under_way = self._tasks.pop(units, None)
        if under_way is not None:
            under_way.cancel()
        now = self._clock()
        seconds = paced_seconds(now - self._offered.get(units, self._begun))
        self._offered[units] = now
        work = self._collect(order, nbytes, Pacing(now, seconds))
        task = asyncio.create_task(work, name=f"collect layers {order.first} to {order.end}")
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
            range_bytes=lambda: self._rates.next_read_bytes(order.owner),
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
            raise PeerError(f"{self._mesh.name} has no {size_text(needed)} free for a copy")

    def _paced(self, owner: str, pacing: Pacing) -> Pace:
        begun, left_before = 0.0, 0

        async def pace(left_bytes: int) -> None:
            nonlocal begun, left_before
            if left_before > left_bytes:
                self._rates.read(owner, left_before - left_bytes, self._clock() - begun)
            if failpoints.armed:
                await failpoints.reach("replica.read.between", device=self._mesh.self_id)
            seconds = pacing.wait_seconds(left_bytes, self._clock())
            if seconds:
                await asyncio.sleep(seconds)
            begun, left_before = self._clock(), left_bytes

        return pace
