"""Feeds the pipeline's two ends: inputs to the first stage, targets to the stages that use them.

    loader --> micro-batches --+--> inputs  --(2 credits)--> each device of stage 0
                               +--> targets --(2 credits)--> each device of the last stage

In the job's order, at most two slices ahead of the stage that works on them. The queues are
independent, because the first stage runs some micro-batches ahead of the last and each device of a
group has slices of its own; that lead bounds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing

from torch import Tensor

from p2ptrain.devices.interface import Arrived, Value
from p2ptrain.errors import PeerError
from p2ptrain.holder.input.loader import FeedItem, MicroBatchLoader
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.kinds import FEED_SEND
from p2ptrain.messages.round_orders import FED_AHEAD
from p2ptrain.messages.tensors import MicroBatchSlice, ResendSamples, SampleRange, StreamId
from p2ptrain.net.message import Message, PartKind
from p2ptrain.runtime.io.sample_division import SampleDivision
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS, TARGETS, Credits, TensorRouter
from p2ptrain.runtime.stage_io import OutputQueues
from p2ptrain.runtime.tiled.tile_layout import StageTileLayout


class Feeder:
    """Feeds one generation.

    Attributes:
        waits_for_data: the next piece has not been loaded.
    """

    def __init__(
        self,
        assignment: Assignment,
        target_stages: Sequence[int],
        router: TensorRouter,
        tiles: StageTileLayout | None = None,
    ) -> None:
        """`tiles`: of the first stage, where it is tiled."""
        self._inputs = _FeedStream(assignment, 0, ACTIVATIONS, router, tiles)
        self._last = len(assignment.stages) - 1
        self._targets = {
            stage: _FeedStream(assignment, stage, TARGETS, router) for stage in target_stages
        }
        self.waits_for_data = True

    async def run(self, feeds: AsyncGenerator[FeedItem, None]) -> None:
        """Send everything `feeds` gives, close it, then wait until all is sent."""
        flows = (self._inputs, *self._targets.values())
        async with asyncio.TaskGroup() as group:
            for flow in flows:
                group.create_task(flow.queues.run())
            async with aclosing(feeds):
                async for feed in feeds:
                    self.waits_for_data = False
                    await self._inputs.put(feed.piece, feed.inputs)
                    for stage, flow in self._targets.items():
                        behind = feed.weight_behind if stage == self._last else None
                        await flow.put(feed.piece, feed.targets, behind)
                    self.waits_for_data = True
            self.waits_for_data = False
            for flow in flows:
                await flow.queues.end()


class _FeedStream:
    """Inputs or targets for all devices of one stage.

    Attributes:
        queues: to those.
    """

    def __init__(
        self,
        assignment: Assignment,
        stage: int,
        flow: str,
        router: TensorRouter,
        tiles: StageTileLayout | None = None,
    ) -> None:
        self._tiles = tiles
        self._router = router
        self._stream = StreamId(assignment.key, stage, flow)
        self._division = SampleDivision(assignment.stages[stage])
        lead = assignment.stages[0].warmup + 2 * FED_AHEAD
        self.queues = OutputQueues(self._division, lambda _: (), self._send, capacity=lead)
        self._credits = {device: Credits(FED_AHEAD) for device in self._division.devices}
        for device, credits in self._credits.items():
            router.connect_credits(self._stream, credits, device)

    async def put(
        self,
        piece: MicroBatchSlice,
        values: Sequence[Tensor],
        behind: Callable[[int], Sequence[Tensor]] | None = None,
    ) -> None:
        """Queue a whole micro-batch; its samples stand in dimension 0 of every value.

        Args:
            behind: first sample of a slice -> what follows its values.
        """
        for part in self._division.slices(piece.key.micro_batch, piece.size):
            rows = _rows(values, part, piece.size)
            if self._tiles is not None:
                rows = self._tiles.entering_parts(part.device, piece.mode, rows)
            if behind is not None:
                rows = [*rows, *behind(part.first)]
            await self.queues.give(part.device, piece.of(part), rows, Arrived(rows))

    async def _send(self, device: str, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        await self._credits[device].acquire()
        await self._router.send_values(device, self._stream, piece, values, PartKind.INPUT)


def _rows(values: Sequence[Tensor], part: SampleRange, size: int) -> Sequence[Tensor]:
    if part.size == size:
        return values
    return [value.narrow(0, part.first, part.size) for value in values]


class ReplayFeed:
    """Sends samples again to a stage that is being rebuilt. Create it, and `close` it.

    Args:
        load: a loader of the job's data, for one request.
        devices: ids that may have samples: those of the plan.
        is_private: samples do not leave this device.
    """

    def __init__(
        self,
        mesh: Mesh,
        router: TensorRouter,
        job: str,
        load: Callable[[], MicroBatchLoader],
        devices: Callable[[], Collection[str]],
        *,
        is_private: bool,
    ) -> None:
        self._mesh = mesh
        self._router = router
        self._job = job
        self._load = load
        self._devices = devices
        self._is_private = is_private
        mesh.route(FEED_SEND, self._send)

    def close(self) -> None:
        """Answer nothing any more."""
        self._mesh.unroute(FEED_SEND)

    async def _send(self, peer: str, message: Message) -> Message:
        wanted = ResendSamples.read(message.fields)
        if wanted.stream.key.job != self._job:
            raise PeerError("this device holds the data of another job")
        if peer not in self._devices() or (self._is_private and peer != self._mesh.self_id):
            raise PeerError("samples of this job are not for that device")
        async with aclosing(self._load().pieces([wanted.shape])) as pieces:
            async for loaded in pieces:
                feed = loaded.feed
                values = feed.inputs
                if wanted.stream.flow == TARGETS:
                    values = [*feed.targets, *(feed.weight_behind(0) if wanted.weighed else ())]
                await self._router.send_values(
                    peer, wanted.stream, feed.piece, values, PartKind.INPUT
                )
        return Message(FEED_SEND)
