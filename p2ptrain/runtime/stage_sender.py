"""Where one stage's results go in one generation: the asyncio half of `StageSender`.

Stages that use one tensor (tied weights) apply the same update to their copies of it: the sum of
the gradients of all its uses. In plain torch each micro-batch's is added up from the last use to
the first, and then to `.grad`. So it goes from the last stage that uses the tensor to the one
before and on to the first, whose `.grad` is plain torch's to the last bit. At the end of the round
the first sends it to the others:

    stage 0                  stage 2           stage 3
       |<----- tied:0 ---------|<---- tied:0 -----|      each micro-batch
       |------ sums:0 -------->|----------------->|      once a round

A large tensor (CHAIN_LIMIT_BYTES) would fill the wire, and groups and tiles add in an order of
their own anyway. Then each stage sends the others its sum, once a round, and all add them from the
last stage's to the first's. Of a group its all-reduce comes before, and its leader sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.kinds import DONE, NORMS
from p2ptrain.messages.round_orders import (
    NORMS_PER_MESSAGE,
    NormsReport,
    RoundOrder,
    RoundReport,
    StageKey,
)
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, SampleRange, StreamId, Value
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage import cross_stage_gradients
from p2ptrain.model.stage.stage import Stage
from p2ptrain.net.message import Message, PartKind, Priority
from p2ptrain.process.memory_budget import available_memory_bytes
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.runtime.io.sample_division import divisions
from p2ptrain.runtime.io.tensor_receiver import TensorReceiver, gradient_contents
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS, GRADIENTS, TARGETS, Credits

EVALUATION_PIECES_AHEAD = 2

CHAIN_LIMIT_BYTES = 16 << 20
"""Most bytes of a tied tensor's gradients that one stage sends each round, if not one sum."""

FREE_MEMORY_SECONDS = 1.0
"""A look takes about 0.3 ms: nothing beside a round of a second, a tenth of the shortest."""


class FreeMemoryGauge:
    """How much there is: looked up once in a while only, for all wait for a stage's report."""

    def __init__(self) -> None:
        self._bytes = 0
        self._looked_at = -math.inf

    def bytes_now(self, now: float) -> int:
        """At most `FREE_MEMORY_SECONDS` old."""
        if now - self._looked_at >= FREE_MEMORY_SECONDS:
            self._bytes, self._looked_at = available_memory_bytes(), now
        return self._bytes


class LiveStageSender:
    """Implements `StageSender` for one stage over the tensor router.

    Attributes:
        index, place: the stage.
        shell: this device.
    """

    def __init__(
        self,
        assignment: Assignment,
        index: int,
        stage: Stage,
        description: ModelDescription,
        shell: LocalDevice,
    ) -> None:
        self._assignment = assignment
        self.index = index
        self._stage = stage
        self._description = description
        self._users = shared_tensors(assignment, description)
        self._tied = [name for name in sorted(self._users) if index in self._users[name]]
        self._chained = frozenset(tied_chains(assignment, description))
        self.shell = shell
        self.place = assignment.stages[index]
        self._divisions = divisions(assignment)
        self._last = len(assignment.stages) - 1
        self._is_answered = gradients_come_back(assignment, description, index)
        self._answers = gradients_come_back(assignment, description, index - 1)
        self._credits: dict[str, Credits] = {}
        self._free_memory = FreeMemoryGauge()
        self._sums: dict[int, TensorReceiver] = {}  # by stage that gives some, the last first
        self._connect()

    # -- StageSender ------------------------------------------------------------------------------

    async def send_forward(
        self, device: str, piece: MicroBatchSlice, values: Sequence[Value]
    ) -> None:
        """Activations to a device of the next stage; once it may be sent more where no gradients
        come back, as in an evaluation."""
        if piece.mode is RoundMode.EVAL or not self._is_answered:
            await self._credits[device].acquire()
        stream = self._stream(self.index + 1, ACTIVATIONS)
        send = self.shell.router.send_values
        await self._reach("forward.send.before")
        await send(device, stream, piece, values, wire=self._assignment.wire)
        await self._reach("forward.send.after")

    async def send_backward(
        self, device: str, piece: MicroBatchSlice, values: Sequence[Value]
    ) -> None:
        """Gradients to a device of the stage before."""
        stream = self._stream(self.index - 1, GRADIENTS)
        send = self.shell.router.send_values
        wire = self._assignment.wire
        await self._reach("backward.send.before")
        await send(device, stream, piece, values, PartKind.GRADIENT, wire=wire)
        await self._reach("backward.send.after")

    async def send_tied(
        self, stream: StreamId, device: str, piece: MicroBatchSlice, values: Sequence[Value]
    ) -> None:
        """A micro-batch's gradient of a tied tensor, to the stage before that uses it."""
        await self.shell.router.send_values(device, stream, piece, values, PartKind.GRADIENT)

    async def send_output(self, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        """Outputs to the holder."""
        stream = self._stream(self._last + 1, "outputs")
        send = self.shell.router.send_values
        await send(self._assignment.holder, stream, piece, values)

    async def send_started(self, piece: MicroBatchSlice, targets: bool) -> None:
        """Credit to the holder, and to those of the stage before that receive no gradients."""
        stream = self._stream(self.index, TARGETS if targets else ACTIVATIONS)
        if targets or self.index == 0:
            await self.shell.router.send_started(self._assignment.holder, stream)
        elif piece.mode is RoundMode.EVAL or not self._answers:
            before = self._divisions[self.index - 1]
            own = SampleRange(self.shell.mesh.self_id, piece.first, piece.end)
            for part in before.overlaps(piece.key.micro_batch, piece.size, own):
                await self.shell.router.send_started(part.device, stream)

    async def exchange_gradients(self, order: RoundOrder) -> bool:
        """Sum tied gradients; see the picture above."""
        if not self._tied:
            return False
        piece = MicroBatchSlice.whole(MicroBatchKey(order.round.index, 0), RoundMode.TRAIN, 1)
        if self._leads:
            await self._reach("ties.send.before", order.round.step)
            for other in range(self._last + 1):
                await self._give_sums(other, piece)
        given: dict[int, Mapping[str, Value]] = {}
        for other, receiver in self._sums.items():
            sums = (await receiver.take(piece.key)).join()
            await self._reach("ties.receive.after", order.round.step)
            given[other] = dict(zip(self._given(other, self.index), sums, strict=True))
        await self.shell.compute.run((0,), partial(self._add, given))
        return True

    async def send_norms(self, order: RoundOrder) -> None:
        """Send this stage's norms to the holder, where the job clips."""
        if self._leads and self._assignment.clip:
            norms = await self.shell.compute.run((0,), self._norms)
            await self._reach("norms.send.before", order.round.step)
            await self._report_norms(order, norms)

    async def report(self, report: RoundReport) -> None:
        """Report to the holder."""
        fields = {
            **StageKey(self._assignment.key, self.index).fields(),
            **replace(report, free_bytes=self._free_memory.bytes_now(monotonic())).fields(),
        }
        await self.shell.mesh.send(self._assignment.holder, Message(DONE, fields))

    # -- inside ----------------------------------------------------------------------------------

    async def _reach(self, name: str, step: int = -1) -> None:
        device = self.shell.mesh.self_id
        await failpoints.reach(name, device=device, stage=self.index, step=step)

    def _owned_names(self) -> list[str]:
        """Trainable parameters whose norm this stage reports: not those an earlier stage owns."""
        place = self._assignment.stages[self.index]
        borrowed = {name for name in self._tied if self._users[name][0] != self.index}
        names = self._description.trainable_names(place.first, place.end)
        return [name for name in names if name not in borrowed]

    def _connect(self) -> None:
        router = self.shell.router
        if self.index < self._last:
            stream = self._stream(self.index + 1, ACTIVATIONS)
            for after in self._assignment.stages[self.index + 1].devices:
                self._credits[after] = Credits(EVALUATION_PIECES_AHEAD)
                router.connect_credits(stream, self._credits[after], after)
        for other in range(self._last, -1, -1):
            if names := self._given(other, self.index):
                self._sums[other] = self._tied_receiver(names, f"sums:{other}", other)

    def _tied_receiver(self, names: Sequence[str], flow: str, other: int) -> TensorReceiver:
        parameters = self._stage.parameters()
        contents = gradient_contents(flow, [parameters[name] for name in names])
        leader = self._assignment.stages[other].leader
        sources = (SampleRange(leader, 0, 1),)
        receiver = TensorReceiver(contents, lambda _number, _size: sources, capacity=2, largest=1)
        self.shell.router.connect_tensors(self._stream(self.index, flow), receiver, {leader})
        return receiver

    @property
    def _leads(self) -> bool:
        return self.place.leader == self.shell.mesh.self_id

    def _given(self, giver: int, taker: int) -> list[str]:
        """Tied tensors whose sums one stage sends to another."""
        return [
            name
            for name, users in sorted(self._users.items())
            if giver != taker and giver in users and taker in users
            if name not in self._chained or giver == users[0]
        ]

    async def _give_sums(self, stage: int, piece: MicroBatchSlice) -> None:
        names = self._given(self.index, stage)
        if not names:
            return
        sums = await self.shell.compute.run((0,), partial(self._gradients, names))
        stream, send = self._stream(stage, f"sums:{self.index}"), self.shell.router.send_values
        for device in self._assignment.stages[stage].devices:
            if device == self.shell.mesh.self_id:  # no copy on the way; each stage clips its own
                sums = [None if total is None else total.clone() for total in sums]
            await send(device, stream, piece, sums, PartKind.GRADIENT, Priority.COLLECTIVE)

    def _add(self, given: Mapping[int, Mapping[str, Value]]) -> None:
        """Put the sums over all stages in place. For the compute thread."""
        for name in self._tied:
            parts = {stage: sums[name] for stage, sums in given.items() if name in sums}
            if parts:
                (parts[self.index],) = self._gradients([name])
                total = cross_stage_gradients.merge(parts[p] for p in sorted(parts, reverse=True))
                inside = None if total is None else self._stage.home.copy_in(total)
                self._stage.parameters()[name].grad = inside

    def _gradients(self, names: Iterable[str]) -> list[Tensor | None]:
        """In host memory. For the compute thread."""
        return self._on_host(self._stage.parameters()[name].grad for name in names)

    def _on_host(self, gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
        """For the compute thread."""
        return self._stage.device.fetched([*gradients])

    def _norms(self) -> list[float | None]:
        """Of the owned gradients. For the compute thread, which waits for the device."""
        parameters = self._stage.parameters()
        owned = {name: parameters[name].grad for name in self._owned_names()}
        found = cross_stage_gradients.tensor_norms(owned)
        norms = dict(zip(found, self._on_host(found.values()), strict=True))
        return [None if (norm := norms.get(name)) is None else norm.item() for name in owned]

    async def _report_norms(self, order: RoundOrder, values: Sequence[float | None]) -> None:
        for first in range(0, max(len(values), 1), NORMS_PER_MESSAGE):
            some = tuple(values[first : first + NORMS_PER_MESSAGE])
            report = NormsReport(order.round.index, first, some)
            spoken = StageKey(self._assignment.key, self.index)
            fields = {**spoken.fields(), **report.fields()}
            await self.shell.mesh.send(self._assignment.holder, Message(NORMS, fields))

    def _stream(self, stage: int, flow: str) -> StreamId:
        return StreamId(self._assignment.key, stage, flow)


def tied_chains(
    assignment: Assignment, description: ModelDescription
) -> Mapping[str, Sequence[int]]:
    """Tied tensors whose gradients go from stage to stage by micro-batch -> these, ascending."""
    alone = _tied_alone(assignment, description)
    return {name: alone[name] for name in alone if _is_chained(assignment, description, name)}


def tied_changes(assignment: Assignment, description: ModelDescription) -> tuple[str, ...]:
    """How tied tensors that are summed by stage change a plan's results."""
    return tuple(
        f"{name} is used in several stages and too large to send its gradient of each "
        "micro-batch: they are added by stage, so last bits may differ from one device's"
        for name in _tied_alone(assignment, description)
        if not _is_chained(assignment, description, name)
    )


def _tied_alone(
    assignment: Assignment, description: ModelDescription
) -> Mapping[str, Sequence[int]]:
    """Tied tensors in stages of one device; groups and tiles add in an order of their own."""
    places = assignment.stages
    return {
        name: stages
        for name, stages in shared_tensors(assignment, description).items()
        if not any(places[p].shared or places[p].tiling is not None for p in stages)
    }


def _is_chained(assignment: Assignment, description: ModelDescription, name: str) -> bool:
    """Not where that takes much more of the wire than one sum a round."""
    count = assignment.micro_batches
    size_bytes = description.tensors_by_name[name].nbytes * count
    return count == 1 or size_bytes <= CHAIN_LIMIT_BYTES


def gradients_come_back(assignment: Assignment, description: ModelDescription, index: int) -> bool:
    """Whether stage `index` receives gradients from the next one.

    In front of the first trained weight there are none. Tiles get them all the same: their
    exchanges are one pattern for all groups of units.
    """
    places = assignment.stages[max(index, 0) : index + 2]
    if len(places) < 2:
        return False
    tiled = any(place.tiling is not None for place in places)
    return tiled or description.carries_gradients(places[0].end)


def shared_tensors(
    assignment: Assignment, description: ModelDescription
) -> Mapping[str, Sequence[int]]:
    """By name, the stages that use a tensor, of those that several use."""
    boundaries = [0, *(place.end for place in assignment.stages)]
    return description.shared_between(boundaries)
