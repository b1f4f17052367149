"""The order of work inside one stage of a synchronous round, as data.

1F1B after PipeDream (SOSP 2019, section 3.2) in its synchronous form: `warmup` (K_p) forwards, then
strictly one backward, one forward, then the remaining backwards. The runtime executes these tuples
and the simulator times them; neither decides anything itself.

Four micro-batches on three stages of depth 2(P-p)-1 (at most 4), every task one tick long, links
free:

    stage 0   F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
    stage 1   .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Only the order of a line is fixed; when a task starts, the arrival of its input decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from p2ptrain.errors import OptionError

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Action:
    """One task of a stage; micro-batches count from 0."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{'F' if self.kind == 'forward' else 'B'}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Stuck:
    """A stage that waits for ever, and the action it cannot start."""

    stage: int
    action: Action


@lru_cache(maxsize=256)
def one_f_one_b(micro_batches: int, warmup: int) -> tuple[Action, ...]:
    """A stage's order: `warmup` forwards, alternation (backward first), remaining backwards.

    Raises:
        OptionError: `warmup` is not between 1 and `micro_batches`.
    """
    if not 1 <= warmup <= micro_batches:
        raise OptionError(f"warmup must lie between 1 and {micro_batches}, found {warmup}")
    order = [Action("forward", m) for m in range(warmup)]
    for m in range(micro_batches):
        order.append(Action("backward", m))
        if m + warmup < micro_batches:
            order.append(Action("forward", m + warmup))
    return tuple(order)


def forward_only(micro_batches: int) -> tuple[Action, ...]:
    """A stage's order without training: evaluation."""
    return tuple(Action("forward", m) for m in range(micro_batches))


def usual_warmup(stages: int, micro_batches: int) -> tuple[int, ...]:
    """K_p = 2(P-p)-1 of every stage (Asteroid, section 3.2), at most `micro_batches`."""
    return tuple(min(2 * (stages - p) - 1, micro_batches) for p in range(stages))


def find_deadlock(orders: Sequence[Sequence[Action]]) -> tuple[Stuck, ...]:
    """Run the stages' orders without time; the stages that never finish, empty if all do.

    A forward needs the same micro-batch's forward in the stage before; a backward needs its own
    forward, and its backward in the stage after.
    """
    done: list[set[Action]] = [set() for _ in orders]
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


def _ready(done: list[set[Action]], stage: int, action: Action) -> bool:
    if action.kind == "forward":
        return stage == 0 or action in done[stage - 1]
    own = Action("forward", action.micro_batch) in done[stage]
    return own and (stage == len(done) - 1 or action in done[stage + 1])
