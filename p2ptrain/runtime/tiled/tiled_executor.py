"""Runs a tiled stage's schedule on one of its devices.

A forward or backward computes until a value of another device is missing, sends what others need,
waits for theirs and continues. All devices of the stage take the micro-batches in the same order,
so none waits for a value that will never come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

from p2ptrain.devices.interface import Arrived
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import MicroBatchSlice
from p2ptrain.plan.types.timeline import EntryKind
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.runtime.executor import StageSpec
from p2ptrain.runtime.io.replay_log import ReplayLog
from p2ptrain.runtime.io.tensor_receiver import GatheredValues
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.stage_io import StageIo, StageSender
from p2ptrain.runtime.sync_executor import SyncStageExecutor
from p2ptrain.runtime.tiled.tile_exchange import TileExchange
from p2ptrain.runtime.tiled.tiled_stage import TiledStage
from p2ptrain.state.snapshot_store import SnapshotStore
from p2ptrain.tiling.kernels.tile_steps import TileMessage


class TiledStageExecutor(SyncStageExecutor):
    """The tiles of one device, for one generation of synchronous rounds."""

    def __init__(
        self,
        task: StageSpec,
        live: LiveStage,
        links: StageSender,
        io: StageIo,
        compute: ComputeThread,
        store: SnapshotStore,
        log: ReplayLog,
        exchange: TileExchange,
    ) -> None:
        """`exchange`: with the stage's other devices; the rest as `SyncStageExecutor`."""
        super().__init__(task, live, links, io, compute, store, log)
        assert isinstance(live.stage, TiledStage)
        self._stage = live.stage
        self._exchange = exchange
        self.waits_for_group = True  # at any time, in the middle of a forward too

    async def _train(self, order: RoundOrder) -> None:
        await super()._train(order)
        self.waits_for_group = True
        self._exchange.round_over(order.round.index)

    async def _evaluate(self, order: RoundOrder) -> float:
        for piece in self.task.pieces(order.round):
            inputs, _ = await self._inputs(order, piece)
            await self._run_forward(piece, inputs)
            outputs = self._stage.outputs(piece.key.micro_batch, RoundMode.EVAL)
            self._stage.forget(piece.key.micro_batch, RoundMode.EVAL)
            self._exchange.finished(piece)
            assert self._io.forward is not None, "no loss is computed in tiles"
            await self._io.forward.put(piece, Arrived(outputs))
        self._exchange.round_over(order.round.index)
        return 0.0

    async def _forward(self, order: RoundOrder, piece: MicroBatchSlice) -> float:
        """Returns 0.0: no loss is computed in tiles."""
        inputs, _ = await self._inputs(order, piece)
        await self._run_forward(piece, inputs)
        outputs = self._stage.outputs(piece.key.micro_batch, RoundMode.TRAIN)
        return await self._give_forward(order, piece, Arrived(outputs))

    async def _run_forward(self, piece: MicroBatchSlice, inputs: GatheredValues) -> None:
        key, mode = piece.key.micro_batch, piece.mode

        def begin() -> list[TileMessage]:
            if mode is RoundMode.TRAIN:
                self._save()
            images = [value for value in inputs.join() if value is not None]
            return self._stage.begin_forward(key, mode, images, piece.samples)

        await self._carry(piece, (1, -self.task.index), begin)

    async def _whole_backward(
        self, order: RoundOrder, piece: MicroBatchSlice, final: Callable[[str], None] | None
    ) -> None:
        given = await self._gradients(order, piece)
        assert given is not None, "no loss is computed in tiles"
        key = piece.key.micro_batch
        notified: set[str] = set()

        def begin() -> list[TileMessage]:
            return self._stage.begin_backward(key, given.join())

        def notify() -> None:
            """Their sum goes round while earlier groups are still computed."""
            if final is None:
                return
            for name in self._stage.final_names(key):
                if name not in notified:
                    notified.add(name)
                    final(name)

        await self._carry(piece, (0, self.task.index), begin, notify)
        self._stage.forget(key, RoundMode.TRAIN)
        self._exchange.finished(piece)
        await self._give_backward(order, piece, Arrived([]))

    async def _carry(
        self,
        piece: MicroBatchSlice,
        urgency: tuple[int, ...],
        begin: Callable[[], list[TileMessage]],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a forward or backward to its end; `after` is called each time it has gone on."""
        key, mode = piece.key.micro_batch, piece.mode
        kind: EntryKind = "forward" if urgency[0] else "backward"
        sent = await self._run(urgency, begin, kind, piece.key)
        while True:
            await self._exchange.send(piece, sent)
            after()
            awaited = self._stage.awaits(key, mode)
            if not awaited:
                return
            began = perf_counter()
            arrived = await self._exchange.take(piece, awaited)
            self._note_wait("wait halo", began)
            receive = partial(self._stage.receive, key, mode, arrived)
            sent = await self._run(urgency, receive, kind, piece.key)
