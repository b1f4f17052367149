"""Prepares one generation on this device: fetches what its stages begin with, builds them.

    asked ──► sizes fit ──► fetch ──► build ──► begins: the stages are handed over
                              └─────────┴─────► cancelled: what arrived whole stays in the store

The plan says what a stage should take, but it comes from another device; the model itself shows it.
So before anything is fetched its graphs run on tensors without memory (`model.graph.result_sizes`),
about 50 ms a stage, and a stage that does not fit what this device offers is refused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner, run_in_background, task_scope
from p2ptrain.errors import Error, PeerError, TooLarge, size_text
from p2ptrain.job.given_weights import stored_here
from p2ptrain.logs import get_logger, timed
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.mutated_state import unchanging_names
from p2ptrain.model.stage.optimizer import optimizer_state_ratio, trained_parameters
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import (
    received,
)
from p2ptrain.model.stage.result_sizes import stage_needs
from p2ptrain.plan.types.allocation import Allocation, sample_ranges
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.process.host_process import trim_heap
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import PrepareFailed
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.state.checksums import ChecksumMismatch, digests_of
from p2ptrain.state.fetch import SourceFailed, fetch_units, state_check
from p2ptrain.state.snapshot_store import Named, StoredTensors
from p2ptrain.state.transfer_client import Known
from p2ptrain.state.transfer_server import version_source
from p2ptrain.worker.device_profile import DeviceProfiler
from p2ptrain.worker.hosted_stages import HostedStages
from p2ptrain.worker.job_store import JobStore

log = get_logger(__name__)


ShortOf: TypeAlias = Callable[[MemoryBudgets], MemoryShortage | None]


@dataclass(frozen=True)
class WorkerContext:
    """What a job's part on this device uses of the device around it.

    Attributes:
        waits: called when the job stands still until the device of that id is back.
        changed: called when the phase of the worker has changed.
    """

    shell: LocalDevice
    measures: DeviceProfiler
    waits: Callable[[str], None]
    changed: Callable[[], None]


class GenerationBuild:
    """The way from an assignment to stages that may begin: `begin`, `take`; or `give_up`.

    Args:
        tasks: whose the work is.
        core: hears the result.
        look: has a version looked through, something of which does not fit its digests.
        planned: what the plan takes here.
        gathers: nothing is built of what is fetched.

    Attributes:
        moved_bytes: what came from other devices so far, whole.
        fetched_bytes: what came of it at all.
    """

    def __init__(
        self,
        assignment: Assignment,
        around: WorkerContext,
        store: JobStore,
        tasks: TaskOwner,
        core: WorkerCore,
        look: Callable[[Version], None],
        planned: MemoryBudgets,
        *,
        gathers: bool,
    ) -> None:
        self.assignment = assignment
        self.moved_bytes = self.fetched_bytes = 0
        self._around = around
        self._mesh = around.shell.mesh
        self._compute = around.shell.compute
        self._store = store
        self._tasks = tasks
        self._core = core
        self._look = look
        self._planned = planned
        self._gathers = gathers
        self._built: HostedStages | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, fetches: tuple[Fetch, ...]) -> None:
        """Read what other devices have, and build; each part that arrives can be read at once."""
        memory = self._around.measures.memory
        # What an old generation takes is free once the new one begins.
        engaged = self._store.hosted is not None
        short_of = partial(memory.short_of, engaged=engaged)
        short = short_of(self._planned)
        if short is None and not self._gathers:
            memory.expect(self._planned, engaged=engaged)
        work = self._make_ready(fetches, short_of, short)
        self._task = self._tasks.spawn(work, f"make ready {self.assignment.key.generation}")

    def take(self) -> HostedStages:
        """The generation begins: its stages."""
        built, self._built = self._built, None  # no memory is kept from here once they end
        assert built is not None
        return built

    def give_up(self, why: str) -> None:
        """Neither others wait for what was to be handed on, nor anything arrives here."""
        if self._task is not None:
            self._task.cancel()
        self._around.shell.states.arriving.give_up(
            self.assignment, self._mesh.self_id, f"{self._mesh.name} {why}"
        )
        if self._built is not None:
            self._built.disconnect()
            self._built = None  # with all its memory, which the next plan counts with

    async def _make_ready(
        self,
        fetches: tuple[Fetch, ...],
        short_of: ShortOf,
        short: MemoryShortage | None,
    ) -> None:
        generation = self.assignment.key.generation
        if short is not None:
            why = short.text(self._mesh.name, self._planned)
            self._core.prepare_failed(generation, PrepareFailed(why, short=short))
            return
        try:
            if not self._gathers and self.assignment.holder != self._mesh.self_id:
                await self._know_sizes(short_of)
            with timed(log, "weights_fetched"):
                await self._fetch_parts(fetches)
            if not self._gathers:
                await self._build_stages()
        except Exception as error:  # reported to the holder, which plans around it
            if isinstance(error, ChecksumMismatch):
                self._look(self.assignment.version)
            self._core.prepare_failed(generation, self._failure(error))
        else:
            trim_heap()  # what the weights' way here has taken
            if not self._compute.device.is_host:
                await self._compute.run((0,), self._compute.device.release_cached)
            self._core.built(generation)

    async def _know_sizes(self, short_of: ShortOf) -> None:
        """Of a model of another device's, whatever the plan says."""
        description, spec = await self._description(), await self._spec()
        apart = self._around.measures.memory.budgets().has_two

        def look() -> None:
            refuse_large_stages(
                self.assignment,
                description,
                self._mesh.self_id,
                optimizer_state_ratio(spec, trained_parameters(description)),
                self._planned,
                short_of,
                apart=apart,
            )

        with timed(log, "sizes_known"):
            await self._compute.run((0,), look)

    async def _fetch_parts(self, fetches: tuple[Fetch, ...]) -> None:
        assignment, version = self.assignment, self.assignment.version
        description = await self._description()
        versions = self._store.versions(description)
        spec = await self._spec()
        check = await self._compute.run((0,), partial(state_check, description, spec))
        self._store.check = check

        def count(nbytes: int) -> None:
            self.fetched_bytes += nbytes

        async def fetch_one(wanted: Fetch) -> None:
            units = (wanted.first, wanted.end)
            known = await self._in_own_files(description, *units)
            state = await fetch_units(
                self._mesh, self._around.shell.states, assignment, wanted, check, count, known=known
            )
            came = (t for n, t in state.tensors.items() if n not in known or t is not known[n][0])
            self.moved_bytes += sum(tensor.nbytes for tensor in came)
            versions.put(StateKind.FETCHED, *units, version, state.tensors, state.digests)
            await failpoints.reach("fetch.between", device=self._mesh.self_id)

        async with task_scope() as group:
            for wanted in fetches:
                if wanted.peer != self._mesh.self_id:
                    group.create_task(fetch_one(wanted))

    async def _in_own_files(self, description: ModelDescription, first: int, end: int) -> Known:
        """Of what no version changes, what a file of this device has, which may be another's."""
        hint, frozen = self.assignment.weights, unchanging_names(description)
        names = frozen.intersection(description.state_names(first, end)) if hint else ()

        def read() -> Known:
            tied, tensors = description.tied, description.tensors_by_name
            also = (alias for alias, name in tied.items() if name in names)
            here = stored_here(hint, {n: tensors[tied.get(n, n)] for n in (*names, *also)})
            named = {f"model:{tied.get(n, n)}": tensor for n, tensor in here.items()}
            return {n: (named[n], digest) for n, digest in digests_of(named).items()}

        return await run_in_background(read) if names else {}

    async def _build_stages(self) -> None:
        description = await self._description()
        versions = self._store.versions(description)
        self._built = HostedStages(
            self.assignment, description, self._around.shell, versions, self._planned
        )

        async def parts(place: StageAssignment) -> Named:
            found = await self._here(place)
            return await self._compute.run((0,), found.own)

        with timed(log, "stages_built"):
            await self._built.prepare(parts, await self._spec())
        self._check_kind()
        await failpoints.reach("build.after", device=self._mesh.self_id)

    def _check_kind(self) -> None:
        """Where a group updates its stage follows from the kinds of all its devices.

        Raises SourceFailed: an accelerator has failed since the plan was made, or is left to
            others. The next plan knows.
        """
        me, found = self._mesh.self_id, self._around.measures.kind
        groups = [one for one in self.assignment.placed.stages if len(one.devices) > 1]
        if any(me in one.devices and one.kind_of(me) != found.kind for one in groups):
            raise SourceFailed(me, f"{self._mesh.name} computes with its {found.title} now")

    async def _here(self, place: StageAssignment) -> StoredTensors:
        source, job = version_source(self.assignment.version), self.assignment.key.job
        try:
            return await self._around.shell.states.read(job, source, place.first, place.end)
        except SourceFailed:
            raise
        except PeerError as error:  # this device was to have it
            raise SourceFailed(self._mesh.self_id, str(error)) from error

    async def _description(self) -> ModelDescription:
        return await self._around.measures.model(self.assignment.digest, self.assignment.holder)

    async def _spec(self) -> OptimizerSpec:
        return await self._compute.run((0,), partial(received, self.assignment.optimizer))

    def _failure(self, error: Exception) -> PrepareFailed:
        short, source = None, None
        if isinstance(error, StageTooLarge):
            short = error.short
            log.warning("stage_too_large", why=str(error))
        elif is_out_of_memory(error):
            short = self._around.measures.memory.ran_out(error)
        elif isinstance(error, SourceFailed):
            source = error.peer
        elif isinstance(error, ChecksumMismatch):
            source = self._mesh.self_id
        elif not isinstance(error, Error):
            log.error("not_made_ready", why=repr(error), exc_info=error)
        reason = str(error) or type(error).__name__
        return PrepareFailed(reason, source, short)


KNOWN_WITHIN = 1.25
"""What is known may be so many times what torch takes: results are counted as if none of what an
operator is made of were freed before its end. A fifth of a device's memory is offered to no job."""


class StageTooLarge(TooLarge):
    """More than this device offers.

    Attributes:
        short: what a plan may count with here, as plans count.
    """

    def __init__(self, message: str, short: MemoryShortage) -> None:
        super().__init__(message)
        self.short = short


def refuse_large_stages(
    assignment: Assignment,
    description: ModelDescription,
    device: str,
    state_ratio: float,
    planned: MemoryBudgets,
    short_of: ShortOf,
    *,
    apart: bool,
) -> None:
    """Do nothing where the stages of `device` fit.

    Args:
        state_ratio: bytes that the optimizer keeps for one of a parameter.
        planned: what the plan says that they take together.
        short_of: which memory there is too little of for so much.
        apart: the device computes in a memory beside the host's, where the state arrives.

    Raises:
        StageTooLarge: they do not; nothing of them has run.
        ProtocolError: they cannot be known.
        RuntimeError, IndexError, ValueError: torch refuses shapes.
    """
    places = [assignment.stages[index] for index in assignment.stages_of(device)]
    each = [
        stage_bytes(assignment, description, one, device, state_ratio, apart=apart)
        for one in places
    ]
    arriving_bytes = sum(one.host_bytes or 0 for one in each)
    known = MemoryBudgets(sum(one.compute_bytes for one in each), arriving_bytes if apart else None)
    needed = replace(known, compute_bytes=math.ceil(known.compute_bytes / KNOWN_WITHIN))
    if planned.shortage(needed) is None:
        return  # there is room for that
    short = short_of(needed)
    if short is None:
        return
    units = " and ".join(f"{place.first} to {place.end - 1}" for place in places)
    known_bytes, planned_bytes, has_bytes = map(short.of, (known, planned, short.has))
    where = "of the host's memory" if short.in_host else "of memory"
    raise StageTooLarge(
        f"layers {units} need {size_text(known_bytes)} {where} ({size_text(planned_bytes)} in the "
        f"plan), and this device may use {size_text(has_bytes)}",
        replace(short, has=short.lowered(short.has, int(planned_bytes * has_bytes / known_bytes))),
    )


def stage_bytes(
    assignment: Assignment,
    description: ModelDescription,
    place: StageAssignment,
    device: str,
    state_ratio: float,
    *,
    apart: bool = False,
) -> MemoryBudgets:
    """Of one stage on one device, training and evaluating; and its state, as it arrives.

    Raises as `refuse_large_stages`.
    """
    units, samples = (place.first, place.end), assignment.micro_batch
    part = _part(place, device)
    trained = stage_needs(description, *units, "train", _samples(place, device, samples))
    values = trained.peak_bytes + (_in_flight(assignment, place) - 1) * trained.kept_bytes
    if assignment.evaluated:
        few = _samples(place, device, assignment.evaluated)
        evaluated = stage_needs(description, *units, "eval", few)
        values = max(values, evaluated.peak_bytes)
    optimizer = math.ceil(state_ratio * trained.trainable_bytes)
    arriving = trained.state_bytes + optimizer
    inside = trained.state_bytes + trained.trainable_bytes + optimizer + math.ceil(part * values)
    if apart and place.is_mixed:  # the host has the weights too, and updates them
        arriving += trained.trainable_bytes
        inside -= optimizer
    return MemoryBudgets(inside, arriving)


def _part(place: StageAssignment, device: str) -> float:
    """Of every map, where the stage is tiled."""
    if place.tiling is None:
        return 1.0
    return place.tiling.areas(place.shares)[place.devices.index(device)]


def _samples(place: StageAssignment, device: str, samples: int) -> int:
    """Of a micro-batch that the device takes, at most."""
    if not place.shared or place.allocation is not Allocation.SAMPLES:
        return samples
    first, end = sample_ranges(place.shares, samples)[place.devices.index(device)]
    return max(end - first, 1)


def _in_flight(assignment: Assignment, place: StageAssignment) -> int:
    """Micro-batches that are kept for their backwards."""
    if place.shared and place.allocation is Allocation.MICRO_BATCHES:
        return 1  # how many of its own it has then, the plan counts
    return min(place.warmup, assignment.micro_batches)
