"""Whether to change the plan now: a move costs a pause, and speeds at home flicker.

A change must gain at least MIN_GAIN of the throughput that the present plan has *at the speeds of
now* (so going there and coming back have the same threshold, with a dead band between), and what it
gains must repay the pause within the rounds that are left, or within REPAY_SECONDS where that
number is unknown. Every change in the last MEMORY_SECONDS doubles the gain asked for: a device that
flickers between two speeds causes a few moves, then the plan stays. Where staying is impossible (a
device is gone, or has less memory than the plan needs) any plan will do. A change from one stage of
all devices to several is doubted (`plan/compare_kinds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.plan.compare_kinds import bias_corrected_seconds, is_shared_whole
from p2ptrain.plan.replan.migration import NOTHING, Migration
from p2ptrain.plan.replan.replan import Replanned
from p2ptrain.plan.types.plan import Plan

MIN_GAIN = 0.05
"""Predicted throughput gained, at least. Lower: more pauses for gains within measuring noise."""

REPAY_SECONDS = 60.0
"""What is gained within this time must repay the pause, where training has no known end."""

PAUSE_SECONDS = 0.5
"""Draining, committing and filling again, beside the migration."""

MEMORY_SECONDS = 600.0
"""How long a change of plan is held against the next one."""


class ReplanAction(StrEnum):
    """What to do."""

    STAY = "stay"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class ReplanDecision:
    """What to do and why.

    Attributes:
        plan: the one to run, the present one when staying.
        gain: predicted throughput over the present plan's now, less 1; None where it cannot stay.
        reason: in a sentence with the numbers.
    """

    action: ReplanAction
    plan: Plan
    migration: Migration
    gain: float | None
    reason: str


def weigh_replan(
    plan: Plan,
    now: float,
    found: Replanned,
    remaining_rounds: int | None = None,
    moved_seconds_ago: Sequence[float] = (),
) -> ReplanDecision:
    """Whether to go to what was found, where staying is possible.

    Arguments:
        now: seconds of a round of `plan`, as things are now.
        remaining_rounds: rounds until training ends, None = unknown.
        moved_seconds_ago: ages of earlier changes of plan that were free to stay (drift, join).
    """
    asked = MIN_GAIN * 2 ** sum(age < MEMORY_SECONDS for age in moved_seconds_ago)
    whole = is_shared_whole(plan)
    new = bias_corrected_seconds(found.plan) if whole else found.plan.predicted.round_seconds
    gain = now / new - 1 if new > 0 else 0.0
    if found.plan.stages == plan.stages:
        return ReplanDecision(ReplanAction.STAY, plan, NOTHING, 0.0, "no faster plan was found")
    said = f"{_percent(gain)} more throughput ({found.reason})"
    if gain < asked:
        return _stay(
            plan, gain, f"{said} is less than the {_percent(asked)} for which a change pays now"
        )
    pause = found.migration.seconds + PAUSE_SECONDS
    horizon = REPAY_SECONDS if remaining_rounds is None else remaining_rounds * now
    saved = horizon * (1 - new / now)
    if saved <= pause:
        return _stay(
            plan,
            gain,
            f"{said} saves {saved:.2g} s in {horizon:.3g} s, and changing takes {pause:.2g} s",
        )
    return ReplanDecision(ReplanAction.MOVE, found.plan, found.migration, gain, said)


def _stay(plan: Plan, gain: float, reason: str) -> ReplanDecision:
    return ReplanDecision(ReplanAction.STAY, plan, NOTHING, gain, reason)


def _percent(part: float) -> str:
    return f"{part * 100:.3g}%"
