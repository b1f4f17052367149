"""Connects what comes into a stage on this device and what goes out, for one generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.round_orders import FED_AHEAD
from p2ptrain.messages.tensors import SampleRange, StreamId
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.values import sample_dimension
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.plan.types.gradient_sums import BucketSizes
from p2ptrain.runtime.allreduce import FLOW, RingAllReduce
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.runtime.executor import StageSpec
from p2ptrain.runtime.io.sample_division import SampleDivision, divisions
from p2ptrain.runtime.io.tensor_receiver import (
    Expected,
    StreamContents,
    TensorReceiver,
    contents_at_cut,
    expected_of,
    gradient_contents,
)
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS, GRADIENTS, TARGETS
from p2ptrain.runtime.reduced_tensors import ReducedTensors
from p2ptrain.runtime.stage_io import (
    DiscardedOutput,
    OutputQueues,
    StageIo,
    TiedGradient,
)
from p2ptrain.runtime.stage_sender import (
    LiveStageSender,
    gradients_come_back,
    shared_tensors,
    tied_chains,
)
from p2ptrain.runtime.staged_reduction import HostGradients, StagedReduction
from p2ptrain.runtime.tiled.tile_layout import ModeTileLayout, StageTileLayout, tiles_of
from p2ptrain.runtime.tiled.tiled_executor import FLOW as TILES
from p2ptrain.runtime.tiled.tiled_executor import TileExchange
from p2ptrain.runtime.tiled.tiled_stage import TiledStage

EARLY_PIECES = 4
"""Pieces of the next round that may arrive while this one ends."""


class StageIoBuilder:
    """The lines of stage `index` on this device."""

    def __init__(
        self, assignment: Assignment, index: int, description: ModelDescription, shell: LocalDevice
    ) -> None:
        self._assignment = assignment
        self._index = index
        self._place = assignment.stages[index]
        self._description = description
        self._shell = shell
        self._divisions = divisions(assignment)
        self._tiles = tiles_of(description, self._place)
        self._tiles_before = tiles_of(description, assignment.stages[index - 1]) if index else None
        self._is_last = index == len(assignment.stages) - 1
        self._receives_gradients = gradients_come_back(assignment, description, index)
        self._sends_gradients = gradients_come_back(assignment, description, index - 1)

    def task(self) -> StageSpec:
        """What the stage is."""
        first, end = self._place.first, self._place.end
        is_forward_only = not self._is_last and not self._receives_gradients
        return StageSpec(
            index=self._index,
            last=self._is_last,
            warmup=1 if is_forward_only else self._place.warmup,
            held=None if is_forward_only else self._place.held,
            seed=self._assignment.seed,
            uses_targets=self._is_weighed
            or any(self._description.target_uses(first, end, m.value) for m in RoundMode),
            division=self._divisions[self._index],
            device=self._shell.mesh.self_id,
            keeps=self._keeps,
            goes_ahead=self._goes_ahead,
            trails=self._turn is not None,
            weighed=self._is_weighed,
        )

    @property
    def _is_weighed(self) -> bool:
        return self._is_last and self._assignment.weighed

    @property
    def _turn(self) -> int | None:
        """Of its sums; None where an update waits for all of them.

        It does where gradients are summed over stages too.
        """
        return self._place.turn if self._goes_ahead and not self._is_tied else None

    @property
    def _goes_ahead(self) -> bool:
        """Not where torch's fast loops may write to sums of gradients that still travel on.

        `foreach` with Nesterov's momentum does. At the commit all have them.
        """
        sums = self._is_tied or len(self._place.devices) > 1
        return self._place.goes_ahead and not (sums and self._assignment.optimizer.uses_loops)

    @property
    def _is_tied(self) -> bool:
        """Whether gradients are summed over stages."""
        tied = shared_tensors(self._assignment, self._description).values()
        return any(self._index in stages for stages in tied)

    @property
    def _keeps(self) -> bool:
        """A checkpoint takes one copy of each stage; to go back to a version, all must have it."""
        assignment = self._assignment
        reads = self._place.backup_peer(assignment.holder) == self._shell.mesh.self_id
        return reads or assignment.placed.protects

    def connect(self, stage: Stage, links: LiveStageSender) -> StageIo:
        """Make tensor receivers and output queues, and let the neighbours' frames in."""
        deepest = max(place.warmup for place in self._assignment.stages)
        return replace(
            self._incoming(2 * deepest + EARLY_PIECES),
            forward=None if self._is_last else self._forward(self._leaving(), links),
            backward=self._backward(self._entering(), links) if self._sends_gradients else None,
            reduction=self._reduction(stage),
            tied=[*self._tied(2 * deepest + EARLY_PIECES, links)],
        )

    def connect_alone(self, rounds: int) -> StageIo:
        """Make tensor receivers for the pieces of so many rounds; what comes out goes nowhere."""
        return replace(
            self._incoming(rounds * self._assignment.micro_batches),
            forward=None if self._is_last else DiscardedOutput(),
            backward=DiscardedOutput() if self._sends_gradients else None,
        )

    def _incoming(self, capacity: int) -> StageIo:
        holder = SampleDivision.of_holder(self._assignment)
        before = self._divisions[self._index - 1] if self._index else holder
        return StageIo(
            activations=self._receiver(ACTIVATIONS, self._entering(), before, capacity),
            targets=self._receiver(TARGETS, self._targets(), holder, capacity),
            gradients=self._receiver(
                GRADIENTS, self._leaving(), self._divisions[self._index + 1], capacity
            )
            if self._receives_gradients
            else None,
            forward=None,
            backward=None,
            reduction=None,
            spans=self._shell.router.spans,
        )

    def _entering(self) -> StreamContents:
        name = f"activations of stage {self._index}"
        if self._tiles is not None:
            return self._tiles_contents(name, self._tiles, ModeTileLayout.entering_expected)
        contents = contents_at_cut(self._description, self._place.first, name)
        if self._tiles_before is not None:
            contents = replace(contents, tiles=self._tiles_before)
        # the holder's inputs stay exact
        wire = self._assignment.wire if self._index else WireFormat.EXACT
        return replace(contents, wire=wire)

    def _leaving(self) -> StreamContents:
        name = f"gradients of stage {self._index}"
        if self._tiles is not None:
            contents = self._tiles_contents(name, self._tiles, ModeTileLayout.leaving_expected)
        else:
            contents = contents_at_cut(self._description, self._place.end, name)
        return replace(contents, optional=True, wire=self._assignment.wire)

    def _tiles_contents(
        self,
        name: str,
        tiles: StageTileLayout,
        of: Callable[[ModeTileLayout, Sequence[int], int], list[Expected]],
    ) -> StreamContents:
        """What goes to the tiles of this device, or comes back to them."""
        own = tiles.tiles(self._shell.mesh.self_id)

        def expected(mode: RoundMode, size: int) -> list[Expected]:
            return of(tiles.of(mode), own, size)

        return StreamContents(name, expected, lambda mode: [0] * len(expected(mode, 1)))

    def _receiver(
        self, flow: str, contents: StreamContents, senders: SampleDivision, capacity: int
    ) -> TensorReceiver:
        own, me = self._divisions[self._index], self._shell.mesh.self_id

        def sources(micro_batch: int, size: int) -> Sequence[SampleRange]:
            part = own.part(me, micro_batch, size)
            return senders.overlaps(micro_batch, size, part) if part is not None else ()

        capacity += FED_AHEAD * len(senders.devices)
        receiver = TensorReceiver(
            contents,
            sources,
            capacity=capacity,
            largest=self._assignment.largest,
            longest=self._assignment.longest,
            buffer=self._shell.compute.device.host_buffer,
        )
        stream = StreamId(self._assignment.key, self._index, flow)
        self._shell.router.connect_tensors(stream, receiver, senders.devices)
        return receiver

    def _targets(self) -> StreamContents:
        values = self._description.targets
        weight: list[Expected] = [(torch.float64, (1,))] if self._is_weighed else []
        return StreamContents(
            f"targets of stage {self._index}",
            lambda mode, *sizes: [
                *(expected_of(value, *sizes) for value in values),
                *(weight if mode is RoundMode.TRAIN else ()),
            ],
            lambda mode: [
                *map(sample_dimension, values),
                *(None for _ in weight if mode is RoundMode.TRAIN),
            ],
        )

    def _forward(self, contents: StreamContents, links: LiveStageSender) -> OutputQueues:
        return OutputQueues(
            self._divisions[self._index + 1],
            contents.dimensions,
            links.send_forward,
            capacity=self._place.warmup,
        )

    def _backward(self, contents: StreamContents, links: LiveStageSender) -> OutputQueues:
        return OutputQueues(
            self._divisions[self._index - 1],
            contents.dimensions,
            links.send_backward,
            capacity=self._place.warmup,
            summed=True,
            part_of=None if self._tiles_before is None else self._tiles_before.leaving_parts,
        )

    def _tied(self, capacity: int, links: LiveStageSender) -> Iterator[TiedGradient]:
        """In the order of the chains, which is that of the stage's tied parameters."""
        chains = tied_chains(self._assignment, self._description)
        for number, (name, users) in enumerate(chains.items()):
            if self._index not in users:
                continue
            flow, place = f"tied:{number}", users.index(self._index)
            later, earlier = None, None
            if place + 1 < len(users):
                contents = gradient_contents(flow, [self._description.tensors_by_name[name]])
                later = self._receiver(flow, contents, self._divisions[users[place + 1]], capacity)
            if place:
                before = users[place - 1]
                stream = StreamId(self._assignment.key, before, flow)
                earlier = OutputQueues(
                    self._divisions[before],
                    lambda _: [None],
                    partial(links.send_tied, stream),
                    capacity=self._place.warmup,
                )
            yield TiedGradient(later, earlier)

    def exchange(self, stage: TiledStage) -> TileExchange:
        """Between the tiles of this stage."""
        deepest = max(place.warmup for place in self._assignment.stages)
        return TileExchange(
            stage,
            StreamId(self._assignment.key, self._index, TILES),
            self._shell.mesh.self_id,
            self._shell.router,
            ahead=2 * deepest + EARLY_PIECES + 2 * FED_AHEAD,
            largest=self._assignment.largest,
        )

    def _reduction(self, stage: Stage) -> RingAllReduce | None:
        if not self._place.shared or self._assignment.asynchrony is not None:
            return None
        stream = StreamId(self._assignment.key, self._index, FLOW)
        me, router = self._shell.mesh.self_id, self._shell.router
        host = None if stage.device.is_host else HostGradients(stage)
        ring = (self.summed(stage, host), stream, self._place.devices, me, router)
        if host is None:
            return RingAllReduce(*ring)
        return StagedReduction(*ring, host=host, stage=stage, compute=self._shell.compute)

    def summed(self, stage: Stage, host: HostGradients | None = None) -> ReducedTensors:
        """What its devices sum, in buckets that all of them cut alike."""
        sizes, wire = BucketSizes(self._place.bucket_bytes), self._assignment.wire
        return ReducedTensors(
            *(stage, sizes.next_bytes, wire, self._turn, sizes.turned_bytes),
            parameters=None if host is None else host.parameters,
            sums=None if host is None else host.statistics,
            buffer=stage.device.host_buffer,
        )
