"""What a device answers about itself: unit times, links, memory, and the model they are of.

A device that has measured a model keeps busy until all have. Some devices share a machine, its
caches or its memory: one that measures while the others rest looks faster than it will be in
training. Where devices share nothing, nothing is lost: the last one is waited for anyway.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from p2ptrain import events
from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.devices.request import MACHINE_VARIABLE
from p2ptrain.errors import (
    AcceleratorFailed,
    Error,
    ProtocolError,
    TooLarge,
    TrainingError,
    size_text,
)
from p2ptrain.events import Event
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import GONE, Mesh, display_name
from p2ptrain.messages.job_requests import (
    LinksAnswer,
    LinksAsked,
    ModelRequest,
    ProfileAnswer,
    ProfileAsked,
    samples_per_s,
)
from p2ptrain.messages.kinds import FETCH_MODEL, MEASURE_LINKS, MEASURE_PROFILE, MODEL_LIMIT_BYTES
from p2ptrain.model.graph.decoding import decode_model
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failure_text
from p2ptrain.model.stage.random_operators import check_default_type
from p2ptrain.net.fields import limited, part_of
from p2ptrain.net.message import Message, Priority
from p2ptrain.plan.types.memory_budgets import NO_MEMORY, MemoryBudgets
from p2ptrain.process.box import Box
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.host_process import MemoryCeiling
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.profiling.fitness import Judge, fit_for_all, names_of_operators
from p2ptrain.profiling.measure_units import work_on
from p2ptrain.profiling.profile_cache import (
    MAX_SECONDS,
    ProfileCache,
    accelerator_sizes,
    at_share,
    has_room,
    measure,
)
from p2ptrain.recovery.compute_kind import KIND_LIMIT, ComputeKind
from p2ptrain.recovery.state_report import StateReport
from p2ptrain.runtime.device import KnownModel
from p2ptrain.worker.job_memory import JobMemory
from p2ptrain.worker.unasked_models import FetchedModel, UnaskedWork

log = get_logger(__name__)

FETCH_TIMEOUT_SECONDS = 120.0

LINK_SECONDS = 0.12
"""How long one direction of a link is measured: 1.5 MB at 100 Mbit/s, well past its slow start."""


class DeviceProfiler:
    """One a device; keeps the newest answers.

    Args:
        memory_bytes: as `JobMemory`.
        ceiling: memory that jobs may take here.
        box: where models of others are measured; None: in the thread that computes.
        emit: called with a model that has ended its process there.
        judge: why an accelerator may not compute a model; called where it computes.

    Attributes:
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
        judge: Judge = fit_for_all,
    ) -> None:
        self._mesh = mesh
        self._compute = compute
        self._profiles = profiles
        self.memory = JobMemory(compute, memory_bytes, ceiling)
        self._judges = judge
        self._verdicts: dict[str, str | None] = {}  # by digest: why the processor computes it
        self._raced: str | None = None  # digest of what both have been timed with
        self.known = KnownModel()
        self._fetched: dict[str, FetchedModel] = {}  # by digest
        self._emit = emit
        self._unasked = None if box is None else UnaskedWork(box, compute, profiles, self._warn)
        self._offers: dict[str, _MemoryOffer] = {}  # by model
        self._speeds: dict[str, tuple[float, float]] = {}  # to a peer: bytes/s, seconds
        self._company = KeepBusy(compute)

    @property
    def kind(self) -> ComputeKind:
        """With what this device computes now."""
        device = self._compute.device
        names = device.kind, device.title, os.environ.get(MACHINE_VARIABLE, "")
        return ComputeKind(*(name[:KIND_LIMIT] for name in names))

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
        digest = asked.digest
        self._company.end()
        self._compute.use_processor(self._verdicts.get(digest) is not None)
        box = None if self.known.own_samples(digest) is not None else self._unasked
        if box is not None and self._compute.device.is_host:
            kind = self.kind
            measured, memory = await self._measure_boxed(asked, box)
        else:
            if box is not None:
                await self._try_in_box(asked, box)
            description = await self.model(digest, asked.holder)  # here it is judged
            measured, memory = await self._measure_somewhere(asked, description)
            kind = self.kind
            if measured and asked.company:
                room, device = memory.compute_bytes, self._compute.device
                work = work_on(description, _middle_size(measured), room, device)
                self._company.begin(self._company.steps(work))
        if self._compute.device.is_host:  # an accelerator does not rest
            measured = at_share(measured, self._compute.share)
        taken = self.memory.note_taken()
        self._offers = {digest: _MemoryOffer(measured, memory, taken, kind)}
        answer = ProfileAnswer(measured, memory, taken, kind)
        return Message(MEASURE_PROFILE, {}, (answer.to_part(),))

    async def _measure_somewhere(
        self, asked: ProfileAsked, description: ModelDescription
    ) -> tuple[Mapping[str, Any], MemoryBudgets]:
        """On the processor, where the accelerator has not all that the model needs, or is slower.

        What it leaves to the host may cost more than it gains. That is looked at once for a model.
        """
        card = self._compute.device
        leaves = card.wrong and card.wrong.keys() & names_of_operators(description)
        try:
            measured, memory = await self._measure_here(asked, description)
            if not (leaves and measured) or asked.digest == self._raced:
                return measured, memory
            why = ""
        except (TrainingError, TooLarge, RuntimeError) as error:
            known = isinstance(error, Error)
            if card.is_host or not (known or is_out_of_memory(error)):
                raise
            left = f"{size_text(self.memory.budgets().compute_bytes)} of its memory are left"
            why = str(error) if known else left
        self._compute.use_processor(True)
        try:
            beside = await self._measure_here(asked, description)
        except (TrainingError, RuntimeError, MemoryError) as error:
            known = isinstance(error, Error) or is_out_of_memory(error)
            if why or not known:
                raise
            beside = {}, NO_MEMORY  # the processor cannot: the card is not slower
        beside_speed = 0.0
        if has_room(beside[0], beside[1].compute_bytes):  # kept times are given whatever is free
            beside_speed = samples_per_s(at_share(beside[0], self._compute.share)) or 0.0
        if not why and (samples_per_s(measured) or 0.0) >= beside_speed:
            self._raced = asked.digest
            self._compute.use_processor(False)
            return measured, memory
        why = why or "it is slower than the CPU, to which it leaves what it computes wrong"
        self._verdicts = {asked.digest: why}
        self._warn_misfit(card.title, why)
        return beside

    async def _measure_here(
        self, asked: ProfileAsked, description: ModelDescription
    ) -> tuple[Mapping[str, Any], MemoryBudgets]:
        """In the thread that computes; and the memory left then."""
        budget, sizes = self.memory.budgets().compute_bytes, asked.batch_sizes
        measured: Mapping[str, Any] = {}
        if sizes:
            if not self._compute.device.is_host:
                sizes = tuple(accelerator_sizes(sizes, asked.most))
            self._check_own(asked.digest, sizes)
            measured = await self._measured(
                description, sizes, budget, largest_second=asked.largest_second
            )
        return measured, self.memory.budgets()

    async def _measure_boxed(
        self, asked: ProfileAsked, box: UnaskedWork
    ) -> tuple[Mapping[str, Any], MemoryBudgets]:
        """As `_measure_here`, of a model of others."""
        budget = self.memory.budgets().compute_bytes
        model = await self._fetch(asked.digest, asked.holder)
        measured: Mapping[str, Any] = {}
        if asked.batch_sizes:
            with timed(log, "measured"):
                measured = await box.measure(
                    model, asked.batch_sizes, budget, largest_second=asked.largest_second
                )
        memory = self.memory.budgets()
        if measured and asked.company:
            self._company.begin(box.work(model, _middle_size(measured), memory.compute_bytes))
        return measured, memory

    async def _try_in_box(self, asked: ProfileAsked, box: UnaskedWork) -> None:
        """Where it can do no harm: a box sees no accelerator, so that the rest runs outside.

        Raises TrainingError: the model fails there, or ends its process.
        """
        if asked.batch_sizes:
            model = await self._fetch(asked.digest, asked.holder)
            room = self.memory.budgets().of_host
            size = (min(asked.batch_sizes),)
            with timed(log, "tried_in_box"):
                await box.measure(model, size, room, largest_second=False, briefly=True)

    def _check_own(self, digest: str, sizes: Sequence[int]) -> None:
        """What others ask of this device's own model, which is measured in this process."""
        most = self.known.own_samples(digest)
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

    def complete(self, state_report: StateReport, digest: str) -> StateReport:
        """With what this device has measured, and what it offers."""
        away = {m.id for m in self._mesh.members.values() if m.state in GONE}
        kind, offer = self.kind, self._offers.get(digest)
        is_now = offer is not None and offer.kind == kind  # an accelerator may have failed since
        memory = NO_MEMORY if offer is None else self.memory.still_offered(offer.memory)
        if offer is not None and not self._compute.device.is_host:  # or others have filled it
            is_now = is_now and has_room(offer.measured, memory.compute_bytes)
        return replace(
            state_report,
            linked=state_report.linked - away,
            memory=memory,
            taken_bytes=0 if offer is None else offer.taken_bytes,
            speeds=tuple((peer, *speed) for peer, speed in self._speeds.items()),
            measured=offer.measured or None if offer is not None and is_now else None,
            compute=kind,
        )

    async def model(self, digest: str, holder: str) -> ModelDescription:
        """A model by its digest, fetched from its holder where it is not known.

        Raises TrainingError: it has ended a process here.
        """
        known = self.known.get(digest)
        if known is None:
            fetched = await self._fetch(digest, holder)
            if self._unasked is not None:
                self._unasked.check(digest)
            with timed(log, "model_read"):
                read = partial(decode_model, fetched.content)
                description = await self._compute.run((0,), read)
            if description.digest != digest:
                raise ProtocolError("the holder sent a model in another form than it is sent")
            self.known.know_fetched(description)
            known = description
        await self._judge(known)
        return known

    async def _judge(self, description: ModelDescription) -> None:
        """A model that the accelerator computes wrong is the processor's, here and in training."""
        compute, digest = self._compute, description.digest
        if digest not in self._verdicts and not compute.device.is_host:
            why = await compute.run((1,), partial(self._judges, description, compute.device))
            self._verdicts = {digest: why}
            if why is not None:
                self._warn_misfit(compute.device.title, why)
        compute.use_processor(self._verdicts.get(digest) is not None)

    def given_up(self, digest: str) -> AcceleratorFailed | None:
        """The accelerator, whose memory has run out, if others have most of it by now.

        The processor does that job from now on.
        """
        compute, offer = self._compute, self._offers.get(digest)
        why = self._verdicts.get(digest)
        if why is None and not compute.device.is_host and offer is not None:
            left_bytes = self.memory.whole_budgets().compute_bytes
            if 2 * left_bytes > offer.memory.compute_bytes:
                return None
            why = f"{size_text(left_bytes)} of its memory are left"
            self._warn_misfit(compute.device.title, why)
            self._verdicts = {digest: why}
            compute.use_processor(True)
        return None if why is None else AcceleratorFailed(f"its accelerator is full: {why}")

    def _warn_misfit(self, title: str, why: str) -> None:
        if self._emit is not None:
            text = f"{title} does not compute this model, the CPU does: {why}"
            self._emit(events.Warning(text))

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


@dataclass(frozen=True)
class _MemoryOffer:
    """What this device measured of a model and offered for it, last.

    Attributes:
        taken_bytes: what the job had taken by then.
        kind: with what it was measured.
    """

    measured: Mapping[str, Any]
    memory: MemoryBudgets
    taken_bytes: int
    kind: ComputeKind


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
