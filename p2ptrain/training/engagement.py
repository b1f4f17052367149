"""This device's part in one epoch: its stages, built, fed and run until the epoch ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.optimizer import StageOptimizer
from p2ptrain.model.optimizer_spec import OptimizerSpec
from p2ptrain.model.stage import Stage
from p2ptrain.model.values import ValueDescription
from p2ptrain.training.assignment import Assignment, StagePlace
from p2ptrain.training.epoch_links import EpochLinks, Shell, separate_names
from p2ptrain.training.inlet import Expected, Inlet
from p2ptrain.training.protocol import RoundOrder
from p2ptrain.training.rounds import Mode
from p2ptrain.training.scope import first_error
from p2ptrain.training.stage_runner import StageRunner, StageTask
from p2ptrain.training.switchboard import Line

FetchState: TypeAlias = Callable[[StagePlace], Awaitable[Mapping[str, Tensor]]]
"""A stage's place -> its tensors by `model:` and `optimizer:` names."""
OnFailure: TypeAlias = Callable[[int, BaseException], Awaitable[None]]
"""(stage, error) -> tell the holder."""

PIECES_AHEAD = 2
"""Inputs that the holder sends before the stage has begun the piece before them."""
EARLY_PIECES = 4
"""Pieces of the next round that may arrive while this one ends."""


class Engagement:
    """The stages of one assignment that live on this device."""

    def __init__(self, assignment: Assignment, description: ModelDescription, shell: Shell) -> None:
        self.assignment = assignment
        self.description = description
        self.runners: dict[int, StageRunner] = {}
        self._links: dict[int, EpochLinks] = {}
        self._shell = shell
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self, fetch: FetchState, spec: OptimizerSpec) -> None:
        """Fetch the weights and build the stages. Raises what `fetch` raises."""
        for index in self.assignment.stages_of(self._shell.mesh.self_id):
            place = self.assignment.stages[index]
            state = await fetch(place)
            await self._build(index, state, spec)

    def start(self, on_failure: OnFailure) -> None:
        """Run the stages until `stop`; `on_failure` is told what ends one early."""
        for index, runner in self.runners.items():
            task = asyncio.create_task(self._run(index, runner, on_failure), name=f"stage {index}")
            self._tasks.append(task)

    async def order(self, order: RoundOrder) -> None:
        """Queue a round for every stage here."""
        for runner in self.runners.values():
            await runner.order(order)

    def coefficient(self, round_index: int, value: Tensor) -> None:
        """The clipping coefficient of a round, for every stage here."""
        for links in self._links.values():
            links.coefficient(round_index, value)

    def state(self, first: int, end: int) -> Mapping[str, Tensor]:
        """Current tensors of the stage that holds exactly units [first, end)."""
        return self._runner(first, end).full_state(copy=False)

    def snapshot(self, step: int, first: int, end: int) -> Mapping[str, Tensor]:
        """The copy taken after update `step`."""
        snapshots = self._runner(first, end).snapshots
        if step not in snapshots:
            raise ProtocolError(f"no snapshot of step {step}")
        return snapshots[step]

    async def stop(self) -> None:
        """End all tasks and disconnect; the stages stay until this object goes."""
        self._shell.switchboard.disconnect(self.assignment.key)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- building --------------------------------------------------------------------------------

    async def _build(self, index: int, state: Mapping[str, Tensor], spec: OptimizerSpec) -> None:
        place = self.assignment.stages[index]
        model = _with_prefix(state, "model:")
        slots = _with_prefix(state, "optimizer:")

        def build() -> tuple[Stage, StageOptimizer]:
            separate = separate_names(self.assignment, self.description)
            here = separate.intersection(model)
            stage = Stage(self.description, place.first, place.end, model, separate=here)
            optimizer = StageOptimizer(spec, stage.parameters())
            if slots:
                optimizer.load_state(slots)
            return stage, optimizer

        stage, optimizer = await self._shell.compute.run((0,), build)
        links = EpochLinks(self.assignment, index, stage, self.description, self._shell)
        self._links[index] = links
        self.runners[index] = StageRunner(
            self._task(index),
            stage,
            optimizer,
            links,
            self._shell.compute,
            self._connect_inlets(index),
        )

    def _task(self, index: int) -> StageTask:
        place = self.assignment.stages[index]
        uses = [self.description.target_uses(place.first, place.end, mode.value) for mode in Mode]
        return StageTask(
            index=index,
            last=index == len(self.assignment.stages) - 1,
            warmup=place.warmup,
            seed=self.assignment.seed,
            uses_targets=any(uses),
        )

    def _connect_inlets(self, index: int) -> tuple[Inlet, Inlet, Inlet]:
        place = self.assignment.stages[index]
        holder = self.assignment.holder
        before = self.assignment.stages[index - 1].device if index else holder
        capacity = 2 * max(p.warmup for p in self.assignment.stages) + EARLY_PIECES
        largest = self.assignment.micro_batch
        activations = Inlet(
            f"activations of stage {index}",
            lambda mode, size: expected_at(self.description, place.first, mode, size),
            capacity=capacity,
            largest=largest,
        )
        targets = Inlet(
            f"targets of stage {index}",
            lambda _mode, size: expected_targets(self.description, size),
            capacity=capacity,
            largest=largest,
        )
        gradients = Inlet(
            f"gradients of stage {index}",
            lambda mode, size: expected_at(self.description, place.end, mode, size),
            capacity=capacity,
            largest=largest,
            optional=True,
        )
        connect = self._shell.switchboard.connect_inlet
        connect(Line(self.assignment.key, index, "activations"), activations, before)
        connect(Line(self.assignment.key, index, "targets"), targets, holder)
        if index + 1 < len(self.assignment.stages):
            after = self.assignment.stages[index + 1].device
            connect(Line(self.assignment.key, index, "gradients"), gradients, after)
        return activations, targets, gradients

    def _runner(self, first: int, end: int) -> StageRunner:
        for index, runner in self.runners.items():
            place = self.assignment.stages[index]
            if (place.first, place.end) == (first, end):
                return runner
        raise ProtocolError(f"no stage of units {first} to {end} here")

    @staticmethod
    async def _run(index: int, runner: StageRunner, on_failure: OnFailure) -> None:
        try:
            await runner.run()
        except ExceptionGroup as group:
            await on_failure(index, first_error(group))


def expected_at(
    description: ModelDescription, boundary: int, mode: Mode, size: int
) -> Sequence[Expected]:
    """What crosses the cut before unit `boundary`, for `size` samples."""
    return [_expected(value, size) for value in description.crossing(boundary, mode.value)]


def expected_targets(description: ModelDescription, size: int) -> Sequence[Expected]:
    """The leaves of the target, for `size` samples."""
    return [_expected(value, size) for value in description.targets]


def _expected(value: ValueDescription, size: int) -> Expected:
    if value.dtype is None:
        raise InternalError(f"{value.name} is a whole number, which never crosses a cut")
    return value.dtype, value.shape(size)


def _with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
