"""The rounds of asynchronous training: an update is made before it counts.

Only the order of mini-batches is the holder's; the stages go on by themselves.
"""

from __future__ import annotations

from p2ptrain.holder.input.mini_batches import MiniBatch
from p2ptrain.holder.rounds.training_loop import TrainingLoop
from p2ptrain.holder.snapshots.checkpointer import Checkpointer
from p2ptrain.job.rounds import PlannedRound
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.runtime.asynchronous.async_executor import orders_under_way


class AsyncTrainingLoop(TrainingLoop):
    """Runs a course of mini-batches on one generation; see `TrainingLoop`."""

    @property
    def _rounds_ahead(self) -> int:
        return orders_under_way(self._generation.assignment.depths)

    async def _no_more(self, rounds: int) -> None:
        await self._generation.no_more(rounds)

    async def _finish_step(self, order: RoundOrder) -> None:
        """The update is made already: a callback that ends the job ends it after those made."""
        reports = await self._generation.tracker.complete(order.round.index)
        await self._callbacks.caught_up()
        step = order.round.step + 1
        self._step(step, order, reports)
        self._round_over(step, reports)

    async def _wants_checkpoint(
        self, checkpointer: Checkpointer, planned: PlannedRound[MiniBatch]
    ) -> bool:
        """Not where one would have to wait for another.

        Without orders the stages stand still: to end a mini-batch they must know what comes,
        as many as there are stages after it. So of those that must be written too close to each
        other, such as the borders of very short epochs, the first one is.
        """
        due = checkpointer.due
        depth = orders_under_way(self._generation.assignment.depths)
        if due is not None and planned.round.step + 1 - due < depth:
            return False
        return await super()._wants_checkpoint(checkpointer, planned)
