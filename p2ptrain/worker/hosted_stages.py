"""This device's stages in one generation: built, fed and run until the generation ends.

    prepare -> start -> stop: nothing runs or arrives any more, and what is here can be reported
                              (`held`), caught up (`apply_ready`) and handed over (`named`)

No two stages of one device share memory. Tensors that were trained here are taken over as they are;
where one stage had the units of two that share a weight, both would use that weight's memory, and
the optimizer of each would update it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor

from p2ptrain.aio.tasks import first_error
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import AcceleratorFailed, Error, PeerError, ProtocolError, UserError
from p2ptrain.job.asynchrony import WeightDelays
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.round_orders import Commit, FailureReport, RoundOrder
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.optimizer import AVERAGE, StageOptimizer, trained_parameters
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.wire.tensor_codec import copy_into
from p2ptrain.plan.types.memory_budgets import NO_MEMORY, MemoryBudgets, MemoryShortage
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.rebuild_plan import replay_log_bytes
from p2ptrain.recovery.state_report import ReplayWindow, StateEntry, StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.asynchronous.async_executor import AsyncStageExecutor
from p2ptrain.runtime.asynchronous.delayed_stage import DelayedStage
from p2ptrain.runtime.asynchronous.gradient_exchange import GradientExchange
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.runtime.io.replay_log import ReplayLog
from p2ptrain.runtime.io.tensor_router import FrameRefused
from p2ptrain.runtime.live_stage import LiveStage, TrainedStage
from p2ptrain.runtime.not_finite import MicroBatchNotFinite
from p2ptrain.runtime.stage_sender import LiveStageSender, tied_chains
from p2ptrain.runtime.sync_executor import SyncStageExecutor
from p2ptrain.runtime.tiled.tiled_executor import TiledStageExecutor
from p2ptrain.runtime.tiled.tiled_stage import TiledStage
from p2ptrain.state.snapshot_store import Named, Place, SnapshotStore, tensors_of_units
from p2ptrain.state.transfer_server import AVERAGES, WEIGHTS
from p2ptrain.worker.stage_io_builder import StageIoBuilder

FetchState: TypeAlias = Callable[[StageAssignment], Awaitable[Mapping[str, Tensor]]]
"""A stage's place -> its tensors by `model:` and `optimizer:` names."""

OnFailure: TypeAlias = Callable[[int, BaseException], Awaitable[None]]
"""(stage, error) -> report to the holder."""


class HostedStages:
    """The stages of one assignment that live on this device.

    Attributes:
        executors: by number of the stage.
        log: what was sent and ordered in the generation.
    """

    def __init__(
        self,
        assignment: Assignment,
        description: ModelDescription,
        shell: LocalDevice,
        store: SnapshotStore | None = None,
        planned: MemoryBudgets = NO_MEMORY,
    ) -> None:
        """Take the part that `assignment` gives this device.

        Args:
            store: where kept copies go: the job's, if it outlives this generation.
            planned: what the plan takes here.
        """
        self.assignment = assignment
        self.description = description
        self.store = SnapshotStore(description) if store is None else store
        self.executors: dict[int, SyncStageExecutor | AsyncStageExecutor] = {}
        most_bytes = replay_log_bytes(planned.total_bytes, planned.host_bytes)
        self.log = ReplayLog(assignment.version.step, most_bytes)
        self._shell = shell
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self, fetch: FetchState, spec: OptimizerSpec) -> None:
        """Fetch the weights and build the stages. Raises what `fetch` raises."""
        memory = UnsharedTensors()
        for index in self.assignment.stages_of(self._shell.mesh.self_id):
            place = self.assignment.stages[index]
            await self._build(index, await fetch(place), spec, memory)

    @property
    def places(self) -> tuple[Place, ...]:
        """What copies this device takes again and again: of its own stages, and for others."""
        me, stages = self._shell.mesh.self_id, self.assignment.stages
        own = ((StateKind.KEPT, place.first, place.end) for place in stages if me in place.devices)
        kept = (
            (StateKind.REPLICA, place.first, place.end) for place in stages if place.copies_to == me
        )
        return (*own, *kept)

    @property
    def is_on_accelerator(self) -> bool:
        """Whether some of its tensors are."""
        return any(not one.live.stage.device.is_host for one in self.executors.values())

    @property
    def logged(self) -> ReplayWindow | None:
        """From which step on a neighbour of one of these stages could be rebuilt."""
        if self.assignment.asynchrony is not None:
            return None  # its updates used other versions than the next
        return ReplayWindow(self.assignment.key.generation, self.log.since)

    async def copy(self) -> None:
        """Keep a copy of every stage as it is; ask before the first round is ordered."""
        async with asyncio.TaskGroup() as group:
            for executor in self.executors.values():
                group.create_task(executor.update.copy())

    def start(self, on_failure: OnFailure) -> None:
        """Run the stages until `stop`; `on_failure` receives what ends one early."""
        for index, executor in self.executors.items():
            task = asyncio.create_task(
                self._run(index, executor, on_failure), name=f"stage {index}"
            )
            self._tasks.append(task)

    async def order(self, order: RoundOrder) -> None:
        """Queue a round for every stage here."""
        if self.assignment.asynchrony is None:
            self.log.note_order(order)
        for executor in self.executors.values():
            await executor.order(order)

    def no_more(self, rounds: int) -> None:
        """So many rounds are ordered in this generation, and none after them.

        Raises:
            ProtocolError: stages here train in synchronous rounds, and do not ask.
        """
        for executor in self.executors.values():
            if not isinstance(executor, AsyncStageExecutor):
                raise ProtocolError("a last order where each round has its own end")
            executor.no_more(rounds)

    def commit(self, commit: Commit) -> None:
        """An update counts: every stage here makes it.

        Raises:
            ProtocolError: a stage here is not ready for it.
        """
        for executor in self.executors.values():
            executor.commit(commit)

    async def applied(self) -> None:
        """Wait until no update is under way here.

        Raises:
            PeerError: one was not made.
        """
        for executor in self.executors.values():
            await executor.update.settled()

    def now(self, what: str, first: int, end: int) -> Named:
        """Current tensors of the stage that holds exactly units [first, end), as `what` says."""
        live = self._executor(first, end).live
        if what == AVERAGES:
            averages = live.optimizer.averages().items()
            return live.on_host({f"optimizer:{name}.{AVERAGE}": t for name, t in averages})
        named = live.present()
        if what == WEIGHTS:
            named = {name: t for name, t in named.items() if name.startswith("model:")}
        return live.on_host(named)

    def disconnect(self) -> None:
        """Nothing arrives any more. May be called again."""
        self._shell.router.disconnect(self.assignment.key)

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
        if self.assignment.fast_math:
            exact = partial(self._shell.device.allow_fast_math, allowed=False)
            await self._shell.compute.run((0,), exact)

    # -- after `stop` ----------------------------------------------------------------------------

    def held(self) -> tuple[StateEntry, ...]:
        """What the stages are; without those that an update, or a failed card, has left torn."""
        return tuple(
            StateEntry(
                place.first, place.end, live.version, StateKind.LIVE, live.ready, live.coefficient
            )
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
            except (RuntimeError, MemoryError, AcceleratorFailed) as error:
                outcome[place.first] = error
        return outcome

    def named_from(self, first: int, end: int, version: Version) -> tuple[int, Named] | None:
        """The tensors of as many units from `first` on as one stage has: where they end, tensors.

        None where no stage here has unit `first` at `version`.
        """
        for place, live in self._whole():
            if place.first <= first < place.end and live.version == version:
                stop = min(end, place.end)
                named = tensors_of_units(self.description, live.named(), first, stop)
                return stop, live.on_host(named)
        return None

    def _whole(self) -> Iterator[tuple[StageAssignment, TrainedStage]]:
        for index, executor in self.executors.items():
            device = executor.live.stage.device
            is_lost = not (device.is_host or device is self._shell.device)
            if not executor.live.torn and not is_lost:
                yield self.assignment.stages[index], executor.live

    # -- building --------------------------------------------------------------------------------

    async def _build(
        self, index: int, state: Mapping[str, Tensor], spec: OptimizerSpec, memory: UnsharedTensors
    ) -> None:
        place, version = self.assignment.stages[index], self.assignment.version
        how, generation = self.assignment.asynchrony, self.assignment.key.generation

        def build() -> LiveStage | DelayedStage:
            me = self._shell.mesh.self_id
            own = memory.of(state)
            at = self._shell.device
            at.allow_fast_math(allowed=self.assignment.fast_math)
            made = built_stage(self.assignment, self.description, place, own, spec, at, owner=me)
            if how is None:
                return LiveStage(*made, version, generation)
            delays = WeightDelays(how, self.assignment.depths, version.step)
            return DelayedStage(*made, version, generation, index, delays, shared=place.shared)

        live = await self._shell.compute.run((0,), build)
        links = LiveStageSender(self.assignment, index, live.stage, self.description, self._shell)
        lines = StageIoBuilder(self.assignment, index, self.description, self._shell)
        connected = lines.connect(live.stage, links)
        compute, store = self._shell.compute, self.store
        if isinstance(live, DelayedStage):
            me, router = self._shell.mesh.self_id, self._shell.router
            exchange = None
            if place.shared:
                exchange = GradientExchange(self.assignment, index, live.stage, me, router)
            depths = self.assignment.depths
            self.executors[index] = AsyncStageExecutor(
                lines.task(), live, links, connected, compute, store, depths, exchange
            )
        elif isinstance(live.stage, TiledStage):
            self.executors[index] = TiledStageExecutor(
                *(lines.task(), live, links, connected, compute, store, self.log),
                lines.exchange(live.stage),
            )
        else:
            self.executors[index] = SyncStageExecutor(
                lines.task(), live, links, connected, compute, store, self.log
            )

    def _executor(self, first: int, end: int) -> SyncStageExecutor | AsyncStageExecutor:
        for index, executor in self.executors.items():
            place = self.assignment.stages[index]
            if (place.first, place.end) == (first, end):
                return executor
        raise ProtocolError(f"no stage of layers {first} to {end} here")

    @staticmethod
    async def _run(
        index: int, executor: SyncStageExecutor | AsyncStageExecutor, on_failure: OnFailure
    ) -> None:
        try:
            await executor.run()
        except ExceptionGroup as group:
            await on_failure(index, first_error(group))


def built_stage(
    assignment: Assignment,
    description: ModelDescription,
    place: StageAssignment,
    state: Mapping[str, Tensor],
    spec: OptimizerSpec,
    device: ComputeDevice = HOST,
    *,
    owner: str = "",
) -> tuple[Stage, StageOptimizer]:
    """A stage and its optimizer, of tensors of their own. For the compute thread.

    Args:
        state: `model:` and `optimizer:` names.
        device: where it computes; tiles are for processors.
        owner: whose tiles of a tiled stage.
    """
    model = _with_prefix(state, "model:")
    index = [other.first for other in assignment.stages].index(place.first)
    chains = tied_chains(assignment, description)
    tied = {name: index == stages[0] for name, stages in chains.items() if index in stages}
    units = (place.first, place.end)
    # What was fetched is ours alone: it becomes the stage's own memory.
    adds_up = place.shared and assignment.asynchrony is None
    if place.tiling is not None:
        stage: Stage = TiledStage(description, place, model, owner)
    else:
        stage = Stage(
            *(description, *units, model),
            copy=False,
            tied=tied,
            shared=adds_up,
            device=device,
            home=HOST if place.is_mixed else device,
            hashes=assignment.hashes,
        )
    group_of = spec.group_of(list(trained_parameters(description)))
    optimizer = StageOptimizer(spec, stage.parameters(), group_of, stage.home)
    optimizer.load_state(_with_prefix(state, "optimizer:"), copy=False)
    return stage, optimizer


def _with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


class UnsharedTensors:
    """What the stages of one generation here are made of, so far."""

    def __init__(self) -> None:
        self._taken: set[int] = set()  # where the memory of tensors begins

    def of(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For one more stage: a copy of what an earlier one is made of. For the compute thread."""
        own = {
            name: copy_into(None, tensor) if _storage_starts(tensor) in self._taken else tensor
            for name, tensor in state.items()
        }
        self._taken.update(map(_storage_starts, own.values()))
        return own


def _storage_starts(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def failure_report(
    error: BaseException, ran_out: Callable[[BaseException], MemoryShortage]
) -> FailureReport:
    """The cause, in the words of `HolderGeneration`, and a text for the user."""
    if isinstance(error, MicroBatchNotFinite):
        return FailureReport(
            "not_finite",
            str(error),
            step=error.step,
            micro_batch=error.micro_batch,
            held_as=error.micro_batch_number,
            is_update=error.is_update,
        )
    if isinstance(error, FrameRefused):
        return FailureReport("refused", str(error), sender=error.sender)
    if is_out_of_memory(error):
        return FailureReport("memory", "it ran out of memory", short=ran_out(error))
    message = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    return FailureReport(_cause(error), message)


def _cause(error: BaseException) -> str:
    if isinstance(error, UserError):
        return "user"
    return "peer" if isinstance(error, PeerError | AcceleratorFailed) else "bug"
