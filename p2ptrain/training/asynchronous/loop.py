"""Asynchronous training, driven from the holder: it says what comes, feeds it, and hears what was.

    order t, t+1, ... ──► stages, each by itself ──► "update t is made here" from all: step t + 1

A step counts once every stage has made its update: only then people hear of it, and only then are
the stages at version t + 1 something to go back to.
"""

from __future__ import annotations

from p2ptrain.training.asynchronous.runner import orders_under_way
from p2ptrain.training.checkpointer import Checkpointer
from p2ptrain.training.protocol import RoundOrder
from p2ptrain.training.training_loop import TrainingLoop


class AsynchronousLoop(TrainingLoop):
    """Runs a course of mini-batches on one epoch; see `TrainingLoop`."""

    @property
    def _rounds_ahead(self) -> int:
        return orders_under_way(self._epoch.assignment.depths)

    async def _no_more(self, rounds: int) -> None:
        await self._epoch.no_more(rounds)

    async def _finish_step(self, order: RoundOrder) -> None:
        reports = await self._epoch.tracker.complete(order.round.index)
        step = order.round.step + 1
        self._step(step, order, reports)
        self._round_over(step, reports)

    async def _wants_checkpoint(self, checkpointer: Checkpointer, step: int) -> bool:
        """Not where one would have to wait for another.

        Whoever orders nothing holds up the stages: to end a mini-batch they must know what comes,
        as many as there are stages after it. So of those that must be written too close to each
        other, such as the borders of very short epochs, the last one is.
        """
        course, depth = self._course, orders_under_way(self._epoch.assignment.depths)
        near = range(step + 1, min(step + depth, course.steps + 1))
        due = checkpointer.due
        if any(course.ends_epoch(later) for later in near):
            return False
        if due is not None and step - due < depth:
            return False
        return await super()._wants_checkpoint(checkpointer, step)
