"""Whether orders of stages ever wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.plan.types.schedule import ScheduleAction


@dataclass(frozen=True, slots=True)
class Stuck:
    """A stage that waits for ever, and the action it cannot start."""

    stage: int
    action: ScheduleAction


def find_deadlock(orders: Sequence[Sequence[ScheduleAction]]) -> tuple[Stuck, ...]:
    """Run the stages' orders without time; the stages that never finish, empty if all do.

    A forward needs the same micro-batch's forward in the stage before; a backward needs its own
    forward, and its backward in the stage after.
    """
    done: list[set[ScheduleAction]] = [set() for _ in orders]
    place = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while place[stage] < len(order) and _ready(done, stage, order[place[stage]]):
                done[stage].add(order[place[stage]])
                place[stage] += 1
                moved = True
    return tuple(
        Stuck(stage, order[place[stage]])
        for stage, order in enumerate(orders)
        if place[stage] < len(order)
    )


def _ready(done: list[set[ScheduleAction]], stage: int, action: ScheduleAction) -> bool:
    if action.kind == "forward":
        return stage == 0 or action in done[stage - 1]
    own = ScheduleAction("forward", action.micro_batch) in done[stage]
    return own and (stage == len(done) - 1 or action in done[stage + 1])
