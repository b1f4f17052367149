"""Plans of two kinds compared: pipelines with one stage of all devices, rounds with no barrier.

    predicted  |== pipeline ==|          |==== one stage of all ====|
    measured   |======= pipeline =======||===== one stage of all =====|

Among thousands of pipelines the search finds those that errors of the profiles favour, and whose
stages wait for each other wherever one takes longer than predicted. Of plans with one stage of all
devices there are few to choose from, so their predictions have no such bias. A comparison of the
two kinds takes it off (docs/decisions/006); predictions stay what the simulation says.

Of rounds and no barrier that is better which reaches the same accuracy sooner, as far as is known:

    seconds to accuracy = seconds of an update x updates that are needed
    updates needed     ~ 1 + PER_LATE_UPDATE x (mean over stages of the updates weights are old by)

Seconds are those of the plain cost model, which flatters rounds: it leaves out messages. Delays
cost a term that grows in proportion to them (Arjevani et al. 2020, "A tight convergence analysis
for stochastic gradient descent with delayed updates"); how much of it shows depends on the job. The
constants are rounded up from docs/results/async.md. Where both are equal, or nearly, rounds are
taken: they are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from p2ptrain.errors import PlanError
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.weight_versions import Weights, depths_of, updates_late

PlanMaker: TypeAlias = Callable[[Profile, Cluster, PlanRequest], Plan]
"""Makes a plan from zero. The one that knows tiles too is `tiling.planning.make_plan.make_plan`."""

DOUBT = 0.12
"""How much longer than predicted a round of several stages is taken to be."""

NOT_THERE = "it would have to fetch the whole model first"
"""Why a device is left out that had no part before."""


def bias_checked_plan(
    planner: PlanMaker,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
) -> Plan:
    """The plan of `planner`; for `auto` all devices in one stage, unless others gain DOUBT.

    One device alone is not doubted either, and is taken where all in one stage would be slower, or
    where devices of different kinds, which are no such stage, gain less together.

    Raises:
        OptionError, PlanError: as `planner`.
    """
    plan = planner(profile, cluster, request)
    if request.planner != "auto" or not is_doubted(plan):
        return plan

    asked = profile, cluster, request
    if _is_mixed(plan, cluster):
        with suppress(PlanError):  # no device can
            return _without_small_gain(plan, _found_by("single", planner, *asked))
        return plan
    with suppress(PlanError):  # not every device can hold the whole model
        whole = _found_by("dp", planner, *asked)
        is_sure = not (is_doubted(whole) or _is_mixed(whole, cluster))
        if is_sure and whole.predicted.round_seconds <= bias_corrected_seconds(plan):
            plan = whole
            alone = _found_by("single", planner, *asked)
            plan = min(whole, alone, key=lambda one: one.predicted.round_seconds)
    return plan


def bias_checked_change(
    planner: PlanMaker,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    present: Plan,
    found: Plan,
) -> Plan:
    """What was `found` in place of `present`, a stage of all devices; or those that are left of it.

    That moves nothing, as each of them has the whole model.

    Args:
        request: for `auto`, with the micro-batch of `present`.
    """
    if request.planner != "auto" or not is_shared_whole(present) or not is_doubted(found):
        return found
    left = present.device_names & {device.name for device in cluster.devices}
    if request.only is not None:
        left &= request.only
    with suppress(PlanError):
        whole = _found_by("dp", planner, profile, cluster, replace(request, only=left))
        if whole.predicted.round_seconds <= bias_corrected_seconds(found):
            others = tuple(replace(out, reason=NOT_THERE) for out in whole.left_out)
            return replace(whole, left_out=others)
    return found


def _is_mixed(plan: Plan, cluster: Cluster) -> bool:
    return len({cluster.device(name).compute for name in plan.device_names}) > 1


def _without_small_gain(plan: Plan, alone: Plan) -> Plan:
    if alone.predicted.round_seconds > bias_corrected_seconds(plan):
        return plan
    gain = alone.predicted.round_seconds / plan.predicted.round_seconds - 1
    reasons = {out.name: out.reason for out in plan.left_out}
    small = f"with it a step may gain {max(gain, 0.0):.1%}, less than a prediction is worth"
    left_out = tuple(replace(out, reason=reasons.get(out.name) or small) for out in alone.left_out)
    return replace(alone, left_out=left_out)


def _found_by(
    name: str,
    planner: PlanMaker,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
) -> Plan:
    """The plan of that planner, as `auto` gives it."""
    found = planner(profile, cluster, replace(request, planner=name))
    return replace(found, planner="auto", found_by=name)


def bias_corrected_seconds(plan: Plan) -> float:
    """Of a round of `plan`, compared with those of a stage of all devices."""
    return (1 + DOUBT * is_doubted(plan)) * plan.predicted.round_seconds


def is_shared_whole(plan: Plan) -> bool:
    """Whether it is one ordinary stage of several devices."""
    return len(plan.stages) == 1 and len(plan.device_names) > 1 and plan.stages[0].tiling is None


def is_doubted(plan: Plan) -> bool:
    """Whether several ordinary stages wait for each other, as they do in rounds."""
    waits = plan.mode is PlanMode.SYNC and len(plan.stages) > 1
    return waits and plan.stages[0].tiling is None


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
