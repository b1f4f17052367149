"""Does a plan belong to a profile and a cluster, fit their memory, and do what was asked?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from p2ptrain.errors import OptionError, PlanError, size_text
from p2ptrain.plan.cost.draft import Draft, StageGroup
from p2ptrain.plan.types.cluster import PROCESSOR, Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest

ROUNDING = 1e-9
"""How far a part may lie above its cap: parts are sums of quotients."""


class WorkloadShare:
    """Whose work is how much of a round: what `--cap` limits; keeps what it has computed.

    Work is counted in the reference device's seconds, forward and backward, so that a slow device
    does not seem to do more than a fast one with the same units and samples:

        part of a device = sum over its stages of
            (the profile's seconds of the stage's units / those of the whole model)
            x (its samples of a round / batch size, of a tiled stage: its part of the maps)

    The parts of a plan's devices sum to 1.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._before: dict[int, tuple[float, ...]] = {}

    def units(self, first: int, end: int, samples: int) -> float:
        """Part of the model's work that units [first, end) are, in micro-batches of `samples`."""
        before = self._before.get(samples)
        if before is None:
            before = self._before[samples] = self._running_parts(samples)
        return before[end] - before[first]

    def parts(self, draft: Draft) -> dict[int, float]:
        """Part of the round's work by device index, of the devices in a stage."""
        split, parts = draft.split, dict.fromkeys(draft.devices, 0.0)
        for units, group in zip(draft.units, draft.groups, strict=True):
            stage = self.units(*units, split.first_samples)
            for place, device in enumerate(group.devices):
                parts[device] += stage * group.round_samples(split, place) / split.batch_size
        return parts

    def _running_parts(self, samples: int) -> tuple[float, ...]:
        """Part of the units before each unit; a profile without any time counts units."""
        times = self._profile.times.at(samples)
        seconds = [sum(pair) for pair in zip(times.forward, times.backward, strict=True)]
        running = list(accumulate(seconds, initial=0.0))
        if running[-1] == 0:
            running = list(range(len(seconds) + 1))
        return tuple(value / running[-1] for value in running)


def plan_parts(plan: Plan, profile: Profile) -> dict[str, float]:
    """Part of the round's work by device name, of the devices in a stage."""
    work, split = WorkloadShare(profile), plan.split
    parts = {device.name: 0.0 for stage in plan.stages for device in stage.devices}
    for stage in plan.stages:
        of_model = work.units(*stage.units, split.first_samples)
        shares = tuple(device.share for device in stage.devices)
        if stage.tiling is not None:
            for device, area in zip(stage.devices, stage.tiling.areas(shares), strict=True):
                parts[device.name] += of_model * area
            continue
        group = StageGroup(tuple(range(len(shares))), shares, stage.allocation)
        for place, device in enumerate(stage.devices):
            samples = group.round_samples(split, place)
            parts[device.name] += of_model * samples / split.batch_size
    return parts


def check_plan(plan: Plan, profile: Profile, cluster: Cluster, *, private: bool = False) -> None:
    """Check what a plan alone cannot know.

    Raises:
        OptionError: units not covered, an unknown device, one that is nowhere, or a device in two
            stages that is not the holder; with `private`, an end that is not the holder's alone;
            as `check_kinds`.
    """
    end = plan.stages[-1].units[1]
    if end != len(profile.units):
        raise OptionError(f"plan.stages: they end at layer {end}, of {len(profile.units)} layers")
    _check_devices(plan, cluster)
    check_kinds(plan, {device.name: device.compute for device in cluster.devices})
    _check_holder(plan, cluster.holder.name, private=private)


def _check_devices(plan: Plan, cluster: Cluster) -> None:
    known = {device.name for device in cluster.devices}
    used = plan.device_names
    named = used | {out.name for out in plan.left_out}
    for name in sorted(named - known):
        raise OptionError(f'plan: device "{name}" is not in the cluster')
    for name in sorted(known - named):
        raise OptionError(f"plan.left_out: {name} is in no stage and not left out")


def check_kinds(plan: Plan, kinds: Mapping[str, str]) -> None:
    """OptionError where devices are to do together what only devices of one kind can.

    Args:
        kinds: with what each device of the plan computes, by name.
    """
    for p, stage in enumerate(plan.stages):
        found = {device.name: kinds[device.name] for device in stage.devices}
        if len({*found.values()}) > 1 and plan.mode is PlanMode.ASYNC:
            named = ", ".join(f"{name}: {kind}" for name, kind in sorted(found.items()))
            raise OptionError(
                f"plan.stages: devices of part {p} compute with different things ({named}): they "
                "train it in whole rounds only (--mode sync)"
            )
        if stage.tiling is not None and {*found.values()} != {PROCESSOR}:
            raise OptionError(
                f"plan.stages: part {p} is computed in tiles, which processors do, and "
                f"{min(found)} computes with {found[min(found)]}"
            )


def _check_holder(plan: Plan, holder: str, *, private: bool) -> None:
    first, last = (tuple(device.name for device in plan.stages[p].devices) for p in (0, -1))
    if len(plan.stages) > 1 and first == last and first != (holder,):
        raise OptionError(
            f'plan.stages: "{first[0]}" has the first and the last stage, but "{holder}" is the '
            "holder, the only device that may"
        )
    if private and not (first == last == (holder,)):
        raise OptionError(
            f'plan.stages: with --private the first and the last stage are "{holder}"\'s alone'
        )


def check_memory(peak_bytes: Mapping[str, int], cluster: Cluster) -> None:
    """PlanError naming the device whose memory is too small for its peak."""
    for device in cluster.devices:
        needed = peak_bytes.get(device.name, 0)
        if needed > device.memory_bytes:
            missing = needed - device.memory_bytes
            raise PlanError(
                f"{device.name} would need {size_text(needed)} and has "
                f"{size_text(device.memory_bytes)}: {size_text(missing)} missing"
            )


def check_request(plan: Plan, profile: Profile, request: PlanRequest) -> None:
    """PlanError naming the device, and its cap, that the plan does not treat as asked.

    Named planners decide as their papers say, so that not each of them can obey every request.
    """
    planner = f'planner "{plan.planner}"'
    parts = plan_parts(plan, profile)
    for name in sorted(request.required - parts.keys()):
        raise PlanError(
            f"{planner} does not use {name}, which --require asks for: try --planner auto"
        )
    if request.only is not None:
        for name in sorted(parts.keys() - request.only):
            raise PlanError(f"{planner} uses {name}, which must not be used")
    for name, cap in sorted(request.caps.items()):
        if parts.get(name, 0.0) > cap + ROUNDING:
            raise PlanError(
                f"{planner} gives {name} {parts[name]:.3f} of the work, more than its "
                f"--cap of {cap:g}: raise it or try --planner auto"
            )
    _check_groups(plan, request)


def _check_groups(plan: Plan, request: PlanRequest) -> None:
    for p, stage in enumerate(plan.stages):
        if len(stage.devices) == 1:
            continue
        if stage.tiling is not None and request.groups:
            continue
        if not request.groups:
            raise PlanError(
                f'planner "{plan.planner}" gives part {p} to {len(stage.devices)} devices, and '
                "only one is allowed: try --planner auto"
            )
        if stage.allocation not in request.allocations:
            raise PlanError(
                f'planner "{plan.planner}" divides {stage.allocation} in part {p}, which is not '
                "allowed: try --planner auto"
            )
