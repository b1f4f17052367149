"""What a device answers about itself: unit times, links, memory, and the model they are of.

A device that has measured a model keeps busy until all have. Some devices share a machine, its
caches or its memory: one that measures while the others rest looks faster than it will be in
training. Where devices share nothing, nothing is lost: the last one is waited for anyway.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from p2ptrain import events
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.aio.threads import run_in_background
from p2ptrain.errors import Error, ProtocolError, TrainingError
from p2ptrain.events import Event
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import GONE, Mesh, display_name
from p2ptrain.messages.job_requests import ModelRequest
from p2ptrain.messages.kinds import FETCH_MODEL, MEASURE_LINKS, MEASURE_PROFILE, MODEL_LIMIT_BYTES
from p2ptrain.messages.measured import LinksAnswer, LinksAsked, ProfileAnswer, ProfileAsked
from p2ptrain.model.graph.decoding import decode_model
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.determinism import check_default_type
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failure_text
from p2ptrain.net.message import Message, Priority
from p2ptrain.net.parts import limited, part_of
from p2ptrain.process.allocator import MemoryCeiling, trim_heap
from p2ptrain.process.box import Box
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.memory_budget import (
    USABLE_SHARE,
    anonymous_bytes,
    available_memory_bytes,
    is_out_of_memory,
    usable_memory_bytes,
)
from p2ptrain.profiling.measure_units import work_on
from p2ptrain.profiling.profile_cache import MAX_SECONDS, ProfileCache, measure
from p2ptrain.recovery.compute_kind import KIND_LIMIT, ComputeKind
from p2ptrain.recovery.state_report import StateReport
from p2ptrain.runtime.device import KnownModel
from p2ptrain.worker.unasked_models import FetchedModel, UnaskedWork

log = get_logger(__name__)

FETCH_TIMEOUT_SECONDS = 120.0

LINK_SECONDS = 0.12
"""How long one direction of a link is measured: 1.5 MB at 100 Mbit/s, well past its slow start."""


class DeviceProfiler:
    """One a device; keeps the newest answers.

    Args:
        memory_bytes: what p2ptrain may use here, or None: what is available.
        ceiling: memory that jobs may take here.
        box: where models of others are measured; None: in the thread that computes.
        emit: called with a model that has ended its process there.
        known: where the model of this device's own job is found.
    """

    def __init__(
        self,
        mesh: Mesh,
        compute: ComputeThread,
        profiles: ProfileCache,
        memory_bytes: int | None,
        ceiling: MemoryCeiling | None = None,
        box: Box | None = None,
        emit: Callable[[Event], None] | None = None,
        known: KnownModel | None = None,
    ) -> None:
        self._mesh = mesh
        self._compute = compute
        self._profiles = profiles
        self._memory_bytes = memory_bytes
        self._ceiling = ceiling
        self._idle_bytes = anonymous_bytes()
        self._known = known or KnownModel()
        self._fetched: dict[str, FetchedModel] = {}  # by digest
        self._emit = emit
        self._unasked = None if box is None else UnaskedWork(box, compute, profiles, self._warn)
        self._offers: dict[str, _MemoryOffer] = {}  # by model
        self._speeds: dict[str, tuple[float, float]] = {}  # to a peer: bytes/s, seconds
        self._company = KeepBusy(compute)

    @property
    def _kind(self) -> ComputeKind:
        device = self._compute.device
        return ComputeKind(device.kind[:KIND_LIMIT], device.title[:KIND_LIMIT])

    async def close(self) -> None:
        """End what still runs."""
        await self._company.close()

    async def measure_profile(self, message: Message) -> Message:
        """Unit times of a model on this device, none without sizes; and the memory it offers.

        Raises:
            OptionError: an app has given this process another default type.
        """
        check_default_type()
        asked = ProfileAsked.read(message.fields)
        digest, sizes = asked.digest, asked.batch_sizes
        self._company.end()
        budget = self.budget_bytes()
        measured: Mapping[str, Any] = {}
        if self._unasked is None or self._known.own_samples(digest) is not None:
            description = await self.model(digest, asked.holder)
            if sizes:
                self._check_own(digest, sizes)
                measured = await self._measured(
                    description, sizes, budget, largest_second=asked.largest_second
                )
            memory_bytes = self.budget_bytes()
            if measured and asked.company:
                steps = work_on(description, _middle_size(measured), memory_bytes)
                self._company.begin(self._company.steps(steps))
        else:
            model = await self._fetch(digest, asked.holder)
            if sizes:
                with timed(log, "measured"):
                    measured = await self._unasked.measure(
                        model, sizes, budget, largest_second=asked.largest_second
                    )
            memory_bytes = self.budget_bytes()
            if measured and asked.company:
                size = _middle_size(measured)
                self._company.begin(self._unasked.work(model, size, memory_bytes))
        taken = max(anonymous_bytes() - self._idle_bytes, 0)
        self._offers = {digest: _MemoryOffer(measured, memory_bytes, taken)}
        answer = ProfileAnswer(measured, memory_bytes, taken, self._kind)
        return Message(MEASURE_PROFILE, {}, (answer.to_part(),))

    def _check_own(self, digest: str, sizes: Sequence[int]) -> None:
        """What others ask of this device's own model, which is measured in this process."""
        most = self._known.own_samples(digest)
        if most is not None and max(sizes) > most:
            raise ProtocolError(f"{max(sizes)} samples, where the job has batches of {most}")

    async def _measured(
        self,
        description: ModelDescription,
        sizes: Sequence[int],
        budget_bytes: int,
        *,
        largest_second: bool,
    ) -> Mapping[str, Any]:
        """Raises TrainingError: the model itself fails, as it does in plain torch."""
        try:
            with timed(log, "measured"):
                return await measure(
                    *(description, sizes, self._compute, self._profiles, budget_bytes),
                    largest_second=largest_second,
                )
        except OPERATORS_RAISE as error:
            if is_out_of_memory(error):
                raise
            raise TrainingError(failure_text(error)) from error

    def _warn(self, source: str, why: str) -> None:
        whose = display_name(self._mesh, source)
        log.warning("model_ended_its_process", source=whose, why=why)
        if self._emit is not None:
            self._emit(events.Warning(f"a model of {whose} {why}; this device is not harmed by it"))

    async def all_measured(self, peer: str, message: Message) -> None:
        """No other device measures any more."""
        self._company.end()

    async def measure_links(self, peer: str, message: Message) -> Message:
        """What this device can send to each of the given members, one after the other.

        Asked `again`, because a link is doubted, it keeps the faster of both measurements.
        """
        asked, speeds = LinksAsked.read(message.fields), []
        for target in dict.fromkeys(asked.peers):
            try:
                speed = await self._mesh.measure_link(target, LINK_SECONDS)
                speeds.append((target, speed.bytes_per_s, speed.latency_s))
                before = self._speeds.get(target, (0.0, 0.0))[0] if asked.again else 0.0
                if speed.bytes_per_s > before:
                    self._speeds[target] = (speed.bytes_per_s, speed.latency_s)
            except (Error, TimeoutError) as error:
                log.info("link_not_measured", target=target[:12], why=str(error))
        return Message(MEASURE_LINKS, LinksAnswer(tuple(speeds)).fields())

    def facts(self, digest: str) -> StateReport:
        """What this device has measured and offers, and nothing of what it has of any job."""
        return self.complete(StateReport(self._mesh.self_id), digest)

    def complete(self, inventory: StateReport, digest: str) -> StateReport:
        """With what this device has measured, and what it offers."""
        away = {m.id for m in self._mesh.members.values() if m.state in GONE}
        offer = self._offers.get(digest)
        return replace(
            inventory,
            linked=inventory.linked - away,
            budget_bytes=0 if offer is None else self._still_offered(offer),
            taken_bytes=0 if offer is None else offer.taken_bytes,
            speeds=tuple((peer, *speed) for peer, speed in self._speeds.items()),
            measured=None if offer is None else offer.measured or None,
            compute=self._kind,
        )

    async def model(self, digest: str, holder: str) -> ModelDescription:
        """A model by its digest, fetched from its holder where it is not known.

        Raises TrainingError: it has ended a process here.
        """
        known = self._known.get(digest)
        if known is None:
            fetched = await self._fetch(digest, holder)
            if self._unasked is not None:
                self._unasked.check(digest)
            with timed(log, "model_read"):
                read = partial(decode_model, fetched.content)
                description = await self._compute.run((0,), read)
            if description.digest != digest:
                raise ProtocolError("the holder sent a model in another form than it is sent")
            self._known.know_fetched(description)
            return description
        return known

    async def _fetch(self, digest: str, holder: str) -> FetchedModel:
        """What the holder sends, kept until another model is fetched; nothing of it is read."""
        if digest not in self._fetched:
            with timed(log, "model_fetched"):
                reply = await self._mesh.call(
                    holder,
                    Message(FETCH_MODEL, ModelRequest(digest).fields()),
                    timeout_seconds=FETCH_TIMEOUT_SECONDS,
                    priority=Priority.TENSOR,
                    reply_parts=limited(MODEL_LIMIT_BYTES),
                )
            content = bytes(part_of(reply))
            found = await run_in_background(lambda: hashlib.sha256(content).hexdigest())
            if found != digest:
                raise ProtocolError("the holder sent another model than it announced")
            self._fetched = {digest: FetchedModel(digest, content, holder)}
        return self._fetched[digest]

    def short_of(self, needed_bytes: int, *, engaged: bool) -> int | None:
        """The memory there is, where a part would need more of it, now that it is to begin.

        Args:
            engaged: what the job takes here now is free once the part begins.
        """
        trim_heap()
        free = available_memory_bytes() + (self._held_bytes() if engaged else 0)
        if needed_bytes <= self._most(free):
            return None
        return self.whole_budget_bytes() if engaged else self.budget_bytes()

    def expect(self, needed_bytes: int, *, engaged: bool) -> None:
        """Hold the process against what the part that begins was planned to need; as `short_of`."""
        if self._ceiling is not None:
            held_bytes = self._held_bytes() if engaged else 0
            self._ceiling.plan(needed_bytes, anonymous_bytes() - held_bytes)

    def budget_bytes(self) -> int:
        """What a job may take now, beside what it takes."""
        trim_heap()  # what measuring, or a job before, has used is free for the next
        return self._most(usable_memory_bytes())

    def whole_budget_bytes(self) -> int:
        """What a job may take now, with what it has taken since this device measured its model."""
        return self._most(int((available_memory_bytes() + self._held_bytes()) * USABLE_SHARE))

    def _still_offered(self, offer: _MemoryOffer) -> int:
        """Of what this device offered when it was idle.

        What others take meanwhile comes from the fifth that was left free. Only where they have
        taken more is it less: else no two plans would be made for the same memory.
        """
        if available_memory_bytes() + self._held_bytes() >= offer.memory_bytes:
            return offer.memory_bytes
        return min(offer.memory_bytes, self.whole_budget_bytes())

    def _held_bytes(self) -> int:
        """What a job has taken of this process since its model was measured."""
        taken = max((offer.taken_bytes for offer in self._offers.values()), default=0)
        return max(anonymous_bytes() - self._idle_bytes - taken, 0)

    def _most(self, free_bytes: int) -> int:
        """What a job may take of what is free."""
        return free_bytes if self._memory_bytes is None else min(self._memory_bytes, free_bytes)


@dataclass(frozen=True)
class _MemoryOffer:
    """What this device measured of a model and offered for it, last.

    Attributes:
        taken_bytes: what the job had taken by then.
    """

    measured: Mapping[str, Any]
    memory_bytes: int
    taken_bytes: int


def _middle_size(measured: Mapping[str, Any]) -> int:
    sizes = sorted(map(int, measured["times"]))
    return sizes[len(sizes) // 2]


_URGENCY = (9,)
"""After all else that this device may have to compute."""


class KeepBusy:
    """One a device."""

    def __init__(self, compute: ComputeThread) -> None:
        self._compute = compute
        self._tasks = TaskOwner(_failed)
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` until `end`: see `steps`, or it runs in a process that ends when cancelled."""
        self.end()
        self._task = self._tasks.spawn(work, "company")

    def end(self) -> None:
        """All have measured."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """End, and wait until that is so."""
        await self._tasks.cancel()

    async def steps(self, steps: Iterator[None]) -> None:
        """Take them, which have no end, in this process, while others may still measure."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_SECONDS
        while loop.time() < until:
            await self._compute.run(_URGENCY, partial(next, steps))


def _failed(name: str, error: BaseException) -> None:
    log.info("company_left", task=name, why=str(error) or type(error).__name__)
