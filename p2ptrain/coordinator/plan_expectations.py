"""What a plan expects of its devices in each round, and profiles as training has corrected them.

Pure. `recovery.drift_watch` compares this with what devices really take; what that shows goes
into the times of the next plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    MeasuredDevice,
    planner_question,
    sharing_machines,
    unusable,
    with_times_of_holder,
)
from p2ptrain.errors import PlanError
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.plan.chrome_trace import simulated_transfers
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, message_seconds, place_seconds
from p2ptrain.plan.cost.overlap import ROUND_MESSAGES
from p2ptrain.plan.round_picture import PredictedRound, predicted_round
from p2ptrain.plan.simulation.simulate import draft_of
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import LeftOut, Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.profile_corrections import ExpectedSeconds, ProfileCorrections
from p2ptrain.tiling.planning.tiled_pipeline import sum_seconds, tile_parts
from p2ptrain.tiling.planning.tiled_plan import costs_of, row_of, simulate_plan
from p2ptrain.tiling.planning.tiling_simulation import simulate_tiles


def usable_now(
    request: JobPlanRequest,
    known: Mapping[str, MeasuredDevice],
    holder: str,
    corrections: ProfileCorrections,
    lowered: Mapping[str, MemoryBudgets],
) -> tuple[dict[str, MeasuredDevice], list[LeftOut]]:
    """Those of `known` that plans can be made for, and why others are left out.

    With times as training has corrected them, and the memory that they proved to have.

    Args:
        known: by id.
        holder: id of the data holder.
        lowered: by id, what devices have left.
    """
    if request.ftpipehd is not None:
        known = with_times_of_holder(holder, known)
    useless = unusable(request, known, holder)
    shared = sharing_machines(one for device, one in known.items() if device not in useless)
    found = {
        device: replace(
            one,
            measured=correct_profiles(one.measured, corrections, device),
            memory=one.memory.at_most(lowered.get(device, one.memory)),
        )
        for device, one in sorted(shared.items())
    }
    return found, [LeftOut(known[device].name, why) for device, why in useless.items()]


def correct_profiles(
    measured: Mapping[str, Any], corrections: ProfileCorrections, device: str
) -> dict[str, Any]:
    """A device's profile as it would be measured now; its file stays as it is.

    Args:
        device: id.
    """
    slowdown = corrections.of_device(device)
    content = dict(measured)
    by_unit = [factor * slowdown for factor in corrections.units]

    def scaled(seconds: Sequence[float]) -> list[float]:
        if not by_unit:
            return [slowdown * one for one in seconds]
        return [factor * one for factor, one in zip(by_unit, seconds, strict=True)]

    content["times"] = {
        size: {part: scaled(seconds) for part, seconds in times.items()}
        for size, times in measured["times"].items()
    }
    if "overheads" in measured:
        content["overheads"] = {n: slowdown * s for n, s in measured["overheads"].items()}
    if "wall_by_cpu" in measured:
        # processor time that it takes more of is expected as such, or it would be found again
        content["wall_by_cpu"] = corrections.of_share(device) * measured["wall_by_cpu"]
    return content


def expected_round(
    request: JobPlanRequest, household: MeasuredCluster, plan: Plan
) -> PredictedRound | None:
    """A round of `plan` as it was simulated; None where there are no rounds.

    Raises:
        PlanError, OptionError: the plan is not one of this household.
    """
    if plan.mode is PlanMode.ASYNC:
        return None
    profile, cluster = planner_question(request.settled(asynchronous=False), household)
    ahead = any(stage.goes_ahead for stage in plan.stages)
    found = simulate_plan(plan, profile, cluster, timeline=True, overlap=True, updates_ahead=ahead)
    entries = simulated_transfers(found.timeline)
    return predicted_round(entries, found.round_seconds, sorted(plan.device_names))


def expected_seconds(
    request: JobPlanRequest, household: MeasuredCluster, plan: Plan
) -> dict[Seat, ExpectedSeconds]:
    """What a round of `plan` should take each stage on each device, by its id.

    Nothing where there are no rounds: stages that run by themselves are not held against a plan,
    unless it is FTPipeHD's; nor of tiles that the cost model cannot follow. What tiles wait for
    each other, in the middle of their work, is no part of their tasks.
    """
    profile, cluster = planner_question(request, household)
    if plan.mode is PlanMode.ASYNC:
        return {} if request.ftpipehd is None else _by_capacity(profile, cluster, household, plan)
    ahead = any(stage.goes_ahead for stage in plan.stages)
    cost = CostModel(profile, cluster, overlap=True, updates_ahead=ahead)
    ids = {candidate.name: candidate.id for candidate in household.candidates}
    share = {c.name: max(c.measured.get("wall_by_cpu", 1.0), 1e-9) for c in household.candidates}
    expected: dict[Seat, ExpectedSeconds] = {}
    try:
        works = _work(cost, plan)
    except PlanError:  # the device that computes them reports what is wrong, if anything
        return {}
    for (p, device), work in works.items():
        name, wall = cost.name(device), work.computing - _round_messages(cost, device)
        beside = work.messages + _round_messages(cost, device)
        expected[p, ids[name]] = ExpectedSeconds(wall, wall / share[name], beside)
    return expected


def _work(cost: CostModel, plan: Plan) -> Mapping[tuple[int, int], StageWork]:
    """Of a round, by stage and device."""
    if plan.stages[0].tiling is not None:
        return round_work(cost, plan)
    draft = draft_of(plan, cost)
    return {
        (p, device): _stage_work(cost, draft, p, place)
        for p, group in enumerate(draft.groups)
        for place, device in enumerate(group.devices)
    }


def _by_capacity(
    profile: Profile, cluster: Cluster, household: MeasuredCluster, plan: Plan
) -> dict[Seat, ExpectedSeconds]:
    """Forwards and backwards of a mini-batch, as FTPipeHD counts: C_i times the sum of T0_l."""
    cost = CostModel(profile, cluster, mode=PlanMode.ASYNC)
    ids = {candidate.name: candidate.id for candidate in household.candidates}
    expected: dict[Seat, ExpectedSeconds] = {}
    for p, stage in enumerate(plan.stages):
        (device,) = stage.devices
        seconds = sum(cost.stage_seconds(cost.index(device.name), *stage.units, plan.micro_batch))
        expected[p, ids[device.name]] = ExpectedSeconds(seconds, seconds)
    return expected


def _stage_work(cost: CostModel, draft: Draft, p: int, place: int) -> StageWork:
    """Of one device of stage p: forwards, backwards and the update; messages of pieces and sums."""
    assert cost.overlap is not None
    group, units = draft.groups[p], draft.units[p]
    seat, device = (draft.split, group, place, units), group.devices[place]
    messages = message_seconds(cost, *seat)
    computing = place_seconds(cost, *seat, splits=draft.splits(p)) - messages
    computing += cost.update_seconds(
        device, *units, group=group.devices, ahead=cost.goes_ahead(draft.devices)
    )
    if len(group.devices) > 1:
        buckets = cost.overlap.buckets(*units, cost.bucket_sizes(group.devices))
        messages += cost.overlap.reduce_seconds(device, len(group.devices), buckets)
    return StageWork(computing, messages)


def _round_messages(cost: CostModel, device: int) -> float:
    """The round's own, which the cost model counts with the update."""
    assert cost.overlap is not None
    return ROUND_MESSAGES * cost.overlap.overheads[device].message_seconds


@dataclass(frozen=True, slots=True)
class StageWork:
    """Seconds of one device in one stage.

    Attributes:
        computing: forwards, backwards and the update.
        messages: what goes between tiles, and to and from other stages.
    """

    computing: float
    messages: float


def round_work(cost: CostModel, plan: Plan) -> Mapping[tuple[int, int], StageWork]:
    """By stage and device. Raises PlanError, as `tiled_plan.round_of`."""
    costs, devices, _, borders = costs_of(cost, plan)
    pieces = sum(tile_parts(plan.split))
    groups = [costs.group(*units) for units in pairwise(borders)]
    exchanges = [e for g in groups if g is not None for e in (g.halo, *g.statistics)]
    computing = simulate_tiles(costs, borders).computing
    found: dict[tuple[int, int], StageWork] = {}
    for place, device in enumerate(devices):
        statistics_seconds = 2 * sum(
            costs.device_seconds(exchange, place) for exchange in exchanges
        )
        update = cost.update_seconds(device, 0, borders[-1])
        found[0, device] = StageWork(
            pieces * computing[place] + update, pieces * statistics_seconds + costs.filter_seconds
        )
    for p, (group, units) in enumerate(row_of(cost, plan).stages, 1):
        for place, device in enumerate(group.devices):
            found[p, device] = _behind(cost, plan.split, group, place, units)
    return found


def _behind(
    cost: CostModel, split: BatchSplit, group: StageGroup, place: int, units: tuple[int, int]
) -> StageWork:
    """Of one of the devices of a stage behind the tiles."""
    messages = message_seconds(cost, split, group, place, units)
    computing = place_seconds(cost, split, group, place, units) - messages
    if len(group.devices) > 1:
        messages += sum_seconds(cost, group, *units)
    update = cost.update_seconds(group.devices[place], *units, group=group.devices)
    return StageWork(computing + update, messages)
