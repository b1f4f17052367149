"""A plan as text for users: each device's work, what it costs, unused devices. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2ptrain.cli.output import aligned
from p2ptrain.errors import size_text
from p2ptrain.plan.cost.check_plan import plan_parts
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode

_STAGES = ("part", "layers", "device", "share", "warm-up")

_DEVICES = ("device", "work", "peak memory", "of")


def plan_text(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    """The whole plan in lines."""
    blocks = [
        _summary(plan, profile),
        aligned([(*_STAGES, "held") if plan.is_split else _STAGES, *_stage_rows(plan, profile)]),
        aligned([_DEVICES, *_device_rows(plan, profile, cluster)]),
    ]
    if plan.left_out:
        blocks.append(["not used:", *(f"  {out.name}: {out.reason}" for out in plan.left_out)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _summary(plan: Plan, profile: Profile) -> list[str]:
    found_by = f", found by {plan.found_by}" if plan.found_by is not None else ""
    predicted = plan.predicted
    return [
        f"{profile.model}, planner {plan.planner}{found_by}: {_pieces(plan)}{_schedule(plan)}",
        f"predicted: {predicted.round_seconds:.4g} s a {period(plan.mode)}, "
        f"{predicted.samples_per_s:,.1f} samples/s",
    ]


def _schedule(plan: Plan) -> str:
    return ", zero-bubble schedule" if plan.is_split else ""


def _pieces(plan: Plan) -> str:
    split = plan.split
    if plan.mode is PlanMode.ASYNC:
        return f"mini-batches of {split.micro_batch}, {plan.stages[0].warmup} in flight"
    if split.micro_batches == 1:
        return f"{split.batch_size} samples in one micro-batch"
    last = split.last_samples
    ragged = "" if last == split.first_samples else f", the last {last}"
    of_all = f"{split.batch_size} samples in {split.micro_batches} micro-batches"
    return f"{of_all} of {split.first_samples}{ragged}"


def period(mode: PlanMode) -> str:
    """What `round_seconds` are the seconds of."""
    return "mini-batch" if mode is PlanMode.ASYNC else "step"


def _stage_rows(plan: Plan, profile: Profile) -> Iterator[Sequence[str]]:
    for p, stage in enumerate(plan.stages):
        for place, device in enumerate(stage.devices):
            head = (str(p), units_text(stage, profile)) if place == 0 else ("", "")
            depths = [str(stage.warmup)] + ([_held_text(stage)] if plan.is_split else [])
            shown = depths if place == 0 else [""] * len(depths)
            yield *head, device.name, _share_text(plan, stage, device), *shown


def _held_text(stage: PlannedStage) -> str:
    """Micro-batches that may be without their weight gradients."""
    return "" if stage.held is None else str(stage.held)


def units_text(stage: PlannedStage, profile: Profile) -> str:
    """Such as `0-3 (conv1 to relu)`, both ends included."""
    first, last = stage.units[0], stage.units[1] - 1
    names = profile.units[first].name, profile.units[last].name
    if first == last:
        return f"{first} ({names[0]})"
    return f"{first}-{last} ({names[0]} to {names[1]})"


def _share_text(plan: Plan, stage: PlannedStage, device: DeviceShare) -> str:
    if len(stage.devices) == 1:
        return "all"
    if stage.tiling is not None:
        rows, columns = stage.tiling.grid
        return f"{device.share} of {rows}x{columns} tiles"
    if stage.allocation is Allocation.MICRO_BATCHES:
        pieces = "mini-batches" if plan.mode is PlanMode.ASYNC else "micro-batches"
        return f"{device.share} of {plan.micro_batches} {pieces}"
    return f"{device.share} of {plan.micro_batch} samples"


def _device_rows(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[Sequence[str]]:
    for name, part in plan_parts(plan, profile).items():
        peak, memory = plan.predicted.peak_bytes[name], cluster.device(name).memory_bytes
        yield name, f"{part:.1%}", size_text(peak), size_text(memory)
