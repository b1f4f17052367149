"""This device's part in one epoch: its stages, built, fed and run until the epoch ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.logs import get_logger, timed
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.optimizer import StageOptimizer
from p2ptrain.model.optimizer_spec import OptimizerSpec
from p2ptrain.model.stage import Stage
from p2ptrain.training.assignment import Assignment, StagePlace
from p2ptrain.training.epoch_links import EpochLinks, Shell, separate_names
from p2ptrain.training.live_stage import LiveStage
from p2ptrain.training.protocol import Commit, RoundOrder
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.scope import first_error
from p2ptrain.training.stage_lines import StageLines
from p2ptrain.training.stage_runner import StageRunner

log = get_logger(__name__)

FetchState: TypeAlias = Callable[[StagePlace], Awaitable[Mapping[str, Tensor]]]
"""A stage's place -> its tensors by `model:` and `optimizer:` names."""
OnFailure: TypeAlias = Callable[[int, BaseException], Awaitable[None]]
"""(stage, error) -> tell the holder."""


class Engagement:
    """The stages of one assignment that live on this device."""

    def __init__(self, assignment: Assignment, description: ModelDescription, shell: Shell) -> None:
        self.assignment = assignment
        self.description = description
        self.runners: dict[int, StageRunner] = {}
        self._shell = shell
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self, fetch: FetchState, spec: OptimizerSpec) -> None:
        """Fetch the weights and build the stages. Raises what `fetch` raises."""
        for index in self.assignment.stages_of(self._shell.mesh.self_id):
            place = self.assignment.stages[index]
            with timed(log, "weights_fetched"):
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

    def commit(self, commit: Commit) -> None:
        """An update counts: every stage here makes it.

        Raises:
            ProtocolError: a stage here is not ready for it.
        """
        for runner in self.runners.values():
            runner.commit(commit)

    async def applied(self) -> None:
        """Wait until no update is under way here.

        Raises:
            PeerError: one was not made.
        """
        for runner in self.runners.values():
            await runner.applied()

    def state(self, first: int, end: int) -> Mapping[str, Tensor]:
        """Current tensors of the stage that holds exactly units [first, end)."""
        return self._runner(first, end).live.present()

    def weights(self, first: int, end: int) -> Mapping[str, Tensor]:
        """As `state`, without the optimizer's part."""
        state = self.state(first, end)
        return {name: tensor for name, tensor in state.items() if name.startswith("model:")}

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

        def build() -> LiveStage:
            separate = separate_names(self.assignment, self.description)
            here = separate.intersection(model)
            units = (place.first, place.end)
            # What was fetched is ours alone: it becomes the stage's own memory.
            stage = Stage(
                self.description, *units, model, copy=False, separate=here, shared=place.shared
            )
            optimizer = StageOptimizer(spec, stage.parameters())
            optimizer.load_state(slots, copy=False)
            version = Version(self.assignment.first_step, 0)
            return LiveStage(stage, optimizer, version, self.assignment.key.epoch)

        live = await self._shell.compute.run((0,), build)
        links = EpochLinks(self.assignment, index, live.stage, self.description, self._shell)
        lines = StageLines(self.assignment, index, self.description, self._shell)
        connected = lines.connect(live.stage, links)
        self.runners[index] = StageRunner(lines.task(), live, links, connected, self._shell.compute)

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


def _with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
