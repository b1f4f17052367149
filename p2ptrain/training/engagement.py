"""This device's part in one epoch: its stages, built, fed and run until the epoch ends.

prepare -> start -> stop: nothing here runs or arrives any more, and what is here can be told
                          (`held`), caught up (`apply_ready`) and handed over (`named`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.model.description import ModelDescription
from p2ptrain.model.optimizer import StageOptimizer
from p2ptrain.model.optimizer_spec import OptimizerSpec
from p2ptrain.model.stage import Stage
from p2ptrain.training.assignment import Assignment, StagePlace
from p2ptrain.training.asynchronous.delayed_stage import DelayedStage
from p2ptrain.training.asynchronous.delays import Delays
from p2ptrain.training.asynchronous.exchange import GradientExchange
from p2ptrain.training.asynchronous.runner import DelayedRunner
from p2ptrain.training.epoch_links import EpochLinks, Shell, separate_names
from p2ptrain.training.epoch_log import EpochLog, limit_bytes
from p2ptrain.training.live_stage import LiveStage, TrainedStage
from p2ptrain.training.own_memory import OwnMemory
from p2ptrain.training.protocol import Coefficient, Commit, RoundOrder
from p2ptrain.training.recovery.holdings import Holding, Kind, Logged
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.scope import first_error
from p2ptrain.training.stage_lines import StageLines
from p2ptrain.training.stage_runner import StageRunner
from p2ptrain.training.tiling.tiled_runner import TiledRunner
from p2ptrain.training.tiling.tiled_stage import TiledStage
from p2ptrain.training.versions import Named, Place, VersionStore, of_units

FetchState: TypeAlias = Callable[[StagePlace], Awaitable[Mapping[str, Tensor]]]
"""A stage's place -> its tensors by `model:` and `optimizer:` names."""
OnFailure: TypeAlias = Callable[[int, BaseException], Awaitable[None]]
"""(stage, error) -> tell the holder."""


class Engagement:
    """The stages of one assignment that live on this device.

    Attributes:
        runners: by number of the stage.
        log: what was sent and told in the epoch.
    """

    def __init__(
        self,
        assignment: Assignment,
        description: ModelDescription,
        shell: Shell,
        store: VersionStore | None = None,
        planned_bytes: int = 0,
    ) -> None:
        """Take the part that `assignment` gives this device.

        Args:
            store: where kept copies go: the job's, if it outlives this epoch.
            planned_bytes: what the plan takes here.
        """
        self.assignment = assignment
        self.description = description
        self.store = VersionStore(description) if store is None else store
        self.runners: dict[int, StageRunner | DelayedRunner] = {}
        self.log = EpochLog(assignment.version.step, limit_bytes(planned_bytes))
        self._shell = shell
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self, fetch: FetchState, spec: OptimizerSpec) -> None:
        """Fetch the weights and build the stages. Raises what `fetch` raises."""
        memory = OwnMemory()
        for index in self.assignment.stages_of(self._shell.mesh.self_id):
            place = self.assignment.stages[index]
            await self._build(index, await fetch(place), spec, memory)

    @property
    def places(self) -> tuple[Place, ...]:
        """What copies this device takes again and again: of its own stages, and for others."""
        me, stages = self._shell.mesh.self_id, self.assignment.stages
        own = ((Kind.KEPT, place.first, place.end) for place in stages if me in place.devices)
        kept = ((Kind.REPLICA, place.first, place.end) for place in stages if place.copies_to == me)
        return (*own, *kept)

    @property
    def logged(self) -> Logged | None:
        """From where on a stage that was beside one of these could be made anew."""
        if self.assignment.asynchrony is not None:
            return None  # its updates used other versions than the next
        return Logged(self.assignment.key.epoch, self.log.since)

    @property
    def keeps(self) -> bool:
        """Whether anything here is copied where a round's order says so."""
        return any(runner.task.keeps for runner in self.runners.values())

    async def copy(self) -> None:
        """Keep a copy of every stage as it is; ask before the first round is ordered."""
        async with asyncio.TaskGroup() as group:
            for runner in self.runners.values():
                group.create_task(runner.update.copy())

    def start(self, on_failure: OnFailure) -> None:
        """Run the stages until `stop`; `on_failure` is told what ends one early."""
        for index, runner in self.runners.items():
            task = asyncio.create_task(self._run(index, runner, on_failure), name=f"stage {index}")
            self._tasks.append(task)

    async def order(self, order: RoundOrder) -> None:
        """Queue a round for every stage here."""
        if self.assignment.asynchrony is None:
            self.log.told(order)
        for runner in self.runners.values():
            await runner.order(order)

    def no_more(self, rounds: int) -> None:
        """So many rounds are ordered in this epoch, and none after them.

        Raises:
            ProtocolError: stages here train in synchronous rounds, and do not ask.
        """
        for runner in self.runners.values():
            if not isinstance(runner, DelayedRunner):
                raise ProtocolError("a last order where each round has its own end")
            runner.no_more(rounds)

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
            await runner.update.settled()

    def state(self, first: int, end: int) -> Mapping[str, Tensor]:
        """Current tensors of the stage that holds exactly units [first, end)."""
        return self._runner(first, end).live.present()

    def weights(self, first: int, end: int) -> Mapping[str, Tensor]:
        """As `state`, without the optimizer's part."""
        state = self.state(first, end)
        return {name: tensor for name, tensor in state.items() if name.startswith("model:")}

    def disconnect(self) -> None:
        """Nothing arrives any more. May be called again."""
        self._shell.switchboard.disconnect(self.assignment.key)

    async def stop(self) -> None:
        """End all tasks, disconnect, and wait until no thread works on the stages either.

        May be called again. The stages stay until this object goes.
        """
        self.disconnect()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._shell.compute.flush()

    # -- after `stop` ----------------------------------------------------------------------------

    def held(self) -> tuple[Holding, ...]:
        """What the stages are; without those that an update has left torn."""
        return tuple(
            Holding(place.first, place.end, live.version, Kind.LIVE, live.ready, live.coefficient)
            for place, live in self._whole()
        )

    async def apply_ready(
        self, version: Version, coefficient: Coefficient | None
    ) -> dict[int, Exception | None]:
        """Make the update to `version`, which others have made, where a stage is ready for it.

        Returns for each of these stages, by first unit, what has torn it; None: it is there.
        """
        outcome: dict[int, Exception | None] = {}
        for place, live in list(self._whole()):
            if live.ready != version:
                continue
            outcome[place.first] = None
            try:
                await self._shell.compute.run((0,), partial(live.apply, coefficient))
            except (RuntimeError, MemoryError) as error:
                outcome[place.first] = error
        return outcome

    def named_from(self, first: int, end: int, version: Version) -> tuple[int, Named] | None:
        """The tensors of as many units from `first` on as one stage has: where they end, tensors.

        None where no stage here has unit `first` at `version`.
        """
        for place, live in self._whole():
            if place.first <= first < place.end and live.version == version:
                stop = min(end, place.end)
                return stop, of_units(self.description, live.named(), first, stop)
        return None

    def _whole(self) -> Iterator[tuple[StagePlace, TrainedStage]]:
        for index, runner in self.runners.items():
            if not runner.live.torn:
                yield self.assignment.stages[index], runner.live

    # -- building --------------------------------------------------------------------------------

    async def _build(
        self, index: int, state: Mapping[str, Tensor], spec: OptimizerSpec, memory: OwnMemory
    ) -> None:
        place, version = self.assignment.stages[index], self.assignment.version
        how, epoch = self.assignment.asynchrony, self.assignment.key.epoch

        def build() -> LiveStage | DelayedStage:
            me = self._shell.mesh.self_id
            own = memory.of(state)
            made = built_stage(self.assignment, self.description, place, own, spec, device=me)
            if how is None:
                return LiveStage(*made, version, epoch)
            delays = Delays(how, self.assignment.depths, version.step)
            return DelayedStage(*made, version, epoch, index, delays, shared=place.shared)

        live = await self._shell.compute.run((0,), build)
        links = EpochLinks(self.assignment, index, live.stage, self.description, self._shell)
        lines = StageLines(self.assignment, index, self.description, self._shell)
        connected = lines.connect(live.stage, links)
        compute, store = self._shell.compute, self.store
        if isinstance(live, DelayedStage):
            me, switchboard = self._shell.mesh.self_id, self._shell.switchboard
            exchange = None
            if place.shared:
                exchange = GradientExchange(self.assignment, index, live.stage, me, switchboard)
            depths = self.assignment.depths
            self.runners[index] = DelayedRunner(
                lines.task(), live, links, connected, compute, store, depths, exchange
            )
        elif isinstance(live.stage, TiledStage):
            self.runners[index] = TiledRunner(
                *(lines.task(), live, links, connected, compute, store, self.log),
                lines.exchange(live.stage),
            )
        else:
            self.runners[index] = StageRunner(
                lines.task(), live, links, connected, compute, store, self.log
            )

    def _runner(self, first: int, end: int) -> StageRunner | DelayedRunner:
        for index, runner in self.runners.items():
            place = self.assignment.stages[index]
            if (place.first, place.end) == (first, end):
                return runner
        raise ProtocolError(f"no stage of layers {first} to {end} here")

    @staticmethod
    async def _run(index: int, runner: StageRunner | DelayedRunner, on_failure: OnFailure) -> None:
        try:
            await runner.run()
        except ExceptionGroup as group:
            await on_failure(index, first_error(group))


def built_stage(
    assignment: Assignment,
    description: ModelDescription,
    place: StagePlace,
    state: Mapping[str, Tensor],
    spec: OptimizerSpec,
    *,
    device: str = "",
) -> tuple[Stage, StageOptimizer]:
    """A stage and its optimizer, of tensors that are nobody else's. For the compute thread.

    Args:
        state: `model:` and `optimizer:` names.
        device: whose tiles of a tiled stage.
    """
    model = _with_prefix(state, "model:")
    here = separate_names(assignment, description).intersection(model)
    units = (place.first, place.end)
    # What was fetched is ours alone: it becomes the stage's own memory.
    adds_up = place.shared and assignment.asynchrony is None
    if place.tiling is not None:
        stage: Stage = TiledStage(description, place, model, device)
    else:
        stage = Stage(description, *units, model, copy=False, separate=here, shared=adds_up)
    optimizer = StageOptimizer(spec, stage.parameters())
    optimizer.load_state(_with_prefix(state, "optimizer:"), copy=False)
    return stage, optimizer


def _with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
