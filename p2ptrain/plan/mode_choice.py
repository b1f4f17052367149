"""Rounds or no barrier: which of two plans reaches the same accuracy sooner, as far as is known.

    seconds to accuracy = seconds of an update x updates that are needed

Seconds are those of the plain cost model for both plans. It leaves out what messages cost, which is
more in rounds of many micro-batches, so it flatters rounds. Updates that are needed grow with the
age of the weights that gradients are computed with:

    factor = 1 + PER_LATE_UPDATE x (mean over stages of the updates by which weights are old)

Delays cost a term that grows in proportion to them (Arjevani et al. 2020, "A tight convergence
analysis for stochastic gradient descent with delayed updates"); how much of it shows depends on the
job. The constants are rounded up from docs/results/async.md. Where both modes are equal, or nearly,
rounds are taken: they are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.plan.types.weight_versions import Weights, depths_of, updates_late

PER_LATE_UPDATE: Mapping[Weights, float] = {
    Weights.STASHED: 0.15,
    Weights.UNSTASHED: 0.15,  # for completeness: never chosen
    Weights.VERTICAL: 1.5,
    Weights.DOUBLE: 0.5,
}
"""How many times more updates, for each update by which weights are old on average. Least where the
last stage, which learns most from a mini-batch, has the newest."""

MIN_GAIN = 1.05
"""Less is within the errors of what is predicted."""


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """Which mode, and why in a sentence."""

    mode: PlanMode
    reason: str


def lags(devices: Sequence[int], weights: Weights) -> tuple[int, ...]:
    """By stage of so many devices each, the updates by which a mini-batch's weights are old."""
    depths = depths_of(devices)
    return tuple(updates_late(weights, depth, depths[0]) for depth in depths)


def more_updates(late: Sequence[int], weights: Weights) -> float:
    """How many times as many updates lead to the same accuracy; `late` by stage."""
    return 1 + PER_LATE_UPDATE[weights] * sum(late) / len(late)


def choose(
    rounds_seconds: float, free_seconds: float, late: Sequence[int], weights: Weights
) -> ModeChoice:
    """Between seconds of an update in rounds and without a barrier.

    Args:
        late: of the plan without a barrier, by stage.
    """
    factor = more_updates(late, weights)
    gain = rounds_seconds / (free_seconds * factor)
    mode = PlanMode.ASYNC if gain >= MIN_GAIN else PlanMode.SYNC
    found = (
        f"a step takes {rounds_seconds:.3g} s with sync and {free_seconds:.3g} s with async, "
        f"which needs {factor:.3g} times as many steps for the same accuracy, because its weights "
        f"are {sum(late) / len(late):.3g} steps old on average"
    )
    if mode is PlanMode.ASYNC:
        return ModeChoice(mode, f"{found}: async is {gain:.2f} times faster")
    if gain > 1:
        return ModeChoice(
            mode, f"{found}: async is {gain:.2f} times faster, which is too little to use it"
        )
    return ModeChoice(mode, f"{found}: sync is {1 / gain:.2f} times faster")


def choose_mode(rounds: Plan, rounds_seconds: float, free: Plan, weights: Weights) -> Plan:
    """One of two plans for the same mini-batches, with the reason.

    Args:
        rounds_seconds: of an update by `rounds`, by the model that `free` is predicted by.
    """
    late = lags([len(stage.devices) for stage in free.stages], weights)
    samples = rounds.split.batch_size
    choice = choose(rounds_seconds, samples / free.predicted.samples_per_s, late, weights)
    return replace(free if choice.mode is PlanMode.ASYNC else rounds, mode_reason=choice.reason)
