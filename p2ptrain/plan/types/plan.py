"""What is decided: which device computes which units, how deep, and what that should cost.

The file `p2ptrain.plan/1`. `Plan.from_json` refuses what can never be a plan;
`plan/cost/check_plan.py` holds a plan against a profile and a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from p2ptrain.errors import OptionError
from p2ptrain.net.read_form import one_line
from p2ptrain.plan.types import json_fields
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.bucket_sizes import MAX_BYTES, USUAL
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.plan.types.tile_shape import MAX_TILES, TileShape

FORMAT = "p2ptrain.plan/1"


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A device's part of a stage; what `share` counts, the stage's allocation says."""

    name: str
    share: int


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Units [first, end) on one device or several, in the order of their sample ranges.

    Attributes:
        warmup: K_p, forwards before the first backward.
        held: the backward is split (`schedule.ZeroBubble`), and so many micro-batches at most are
            without their weight gradients; None = it is not.
        tiling: how its maps are cut, where it is tiled.
        goes_ahead: its devices have the memory to make updates before they count.
        turn: its devices begin a round before the sums of the one before are all there, and those
            of the units before this one come last, first units first; None = they do not.
        bucket_bytes: of gradients in the first and in the last bucket that its devices sum.
    """

    units: tuple[int, int]
    devices: tuple[DeviceShare, ...]
    warmup: int
    allocation: Allocation = Allocation.SAMPLES
    held: int | None = None
    tiling: TileShape | None = None
    goes_ahead: bool = False
    turn: int | None = None
    bucket_bytes: int = USUAL.least_bytes


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plain cost model says of one round."""

    round_seconds: float
    samples_per_s: float
    peak_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A device that takes no part, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for one synchronous round of `split.batch_size` samples.

    Attributes:
        planner: the one asked for.
        stages: in the order of their units.
        left_out: every device of the cluster that stands in no stage.
        found_by: with planner "auto", the planner whose plan this is.
        mode: asynchronously a micro-batch is a whole mini-batch, and `micro_batches` of them are
            the window that stages deal, again and again; `predicted` is of one mini-batch.
        mode_reason: why this mode, where it was the planner's choice; "" where it was not.
    """

    planner: str
    split: BatchSplit
    stages: tuple[PlannedStage, ...]
    predicted: Predicted
    left_out: tuple[LeftOut, ...] = ()
    found_by: str | None = field(default=None)
    mode: PlanMode = PlanMode.SYNC
    mode_reason: str = ""

    def __post_init__(self) -> None:
        _check_stages(self)

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch; the last of a round may have fewer."""
        return self.split.micro_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a round."""
        return self.split.micro_batches

    @property
    def device_names(self) -> frozenset[str]:
        """Of the devices that have a part."""
        return frozenset(device.name for stage in self.stages for device in stage.devices)

    @property
    def is_split(self) -> bool:
        """Whether some stage computes the gradients of its weights later than the others."""
        return any(stage.held is not None for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        content: dict[str, Any] = {"format": FORMAT, "planner": self.planner}
        if self.found_by is not None:
            content["found_by"] = self.found_by
        if self.mode is not PlanMode.SYNC:
            content["mode"] = str(self.mode)
        if self.mode_reason:
            content["mode_reason"] = self.mode_reason
        return content | {
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "stages": [_stage_to_json(stage) for stage in self.stages],
            "predicted": {
                "round_seconds": self.predicted.round_seconds,
                "samples_per_s": self.predicted.samples_per_s,
                "peak_bytes": dict(self.predicted.peak_bytes),
            },
            "left_out": [{"name": out.name, "reason": out.reason} for out in self.left_out],
        }

    @classmethod
    def from_json(cls, value: object, where: str = "plan", batch_size: int | None = None) -> Plan:
        """Read the file's content; OptionError names the field that is missing or wrong.

        The file does not hold the batch size. Without `batch_size` it follows from `predicted`
        where that fits the number of micro-batches, else the last micro-batch is a full one.
        """
        json_fields.file_format(value, where, FORMAT)
        required = ("format", "planner", "micro_batch", "micro_batches", "stages", "predicted")
        entry = json_fields.members(
            value, where, (*required, "left_out"), ("found_by", "mode", "mode_reason")
        )
        stages = json_fields.items(entry["stages"], f"{where}.stages")
        left_out = json_fields.items(entry["left_out"], f"{where}.left_out")
        found_by = entry.get("found_by")
        size = json_fields.whole(entry["micro_batch"], f"{where}.micro_batch", least=1)
        count = json_fields.whole(entry["micro_batches"], f"{where}.micro_batches", least=1)
        predicted = _predicted(entry["predicted"], f"{where}.predicted")
        mode = _mode(entry.get("mode", "sync"), f"{where}.mode")
        if mode is PlanMode.ASYNC:
            batch_size = size * count  # whatever travels together, a whole mini-batch or a piece
        split = BatchSplit(batch_size or _batch_size(size, count, predicted), size).checked()
        if split.micro_batches != count:
            raise OptionError(
                f"{where}.micro_batches: {count}, but {split.batch_size} samples are "
                f"{split.micro_batches} micro-batches of {size}"
            )
        return cls(
            planner=json_fields.text(entry["planner"], f"{where}.planner"),
            split=split,
            stages=tuple(_stage(stage, f"{where}.stages[{i}]") for i, stage in enumerate(stages)),
            predicted=predicted,
            left_out=tuple(_left_out(o, f"{where}.left_out[{i}]") for i, o in enumerate(left_out)),
            found_by=None if found_by is None else json_fields.text(found_by, f"{where}.found_by"),
            mode=mode,
            mode_reason=json_fields.text(entry["mode_reason"], f"{where}.mode_reason")
            if "mode_reason" in entry
            else "",
        )


def _check_stages(plan: Plan) -> None:
    if not plan.stages:
        raise OptionError("plan.stages: a plan needs at least one stage")
    end, warmup = 0, plan.micro_batches
    for i, stage in enumerate(plan.stages):
        where = f"plan.stages[{i}]"
        if stage.units[0] != end or stage.units[1] <= end:
            raise OptionError(
                f"{where}.units: {list(stage.units)} must begin at {end}, where the stage before "
                "ends, and hold at least one unit"
            )
        if not 1 <= stage.warmup <= warmup:
            raise OptionError(
                f"{where}.warmup: {stage.warmup} must lie between 1 and {warmup} (the stage "
                "before's, at most micro_batches): a warm-up that grows deadlocks"
            )
        if stage.held is not None:
            _check_held(plan, stage.warmup, stage.held, where)
        if stage.bucket_bytes > MAX_BYTES:
            raise OptionError(f"{where}.bucket_bytes: at most {MAX_BYTES}")
        if stage.turn is not None and not stage.units[0] < stage.turn <= stage.units[1]:
            raise OptionError(
                f"{where}.turn: {stage.turn} is none of the stage's units, {stage.units}"
            )
        if stage.allocation is Allocation.TILES or stage.tiling is not None:
            _check_tiles(plan, stage, where)
        else:
            _check_shares(plan, stage, where)
        end, warmup = stage.units[1], stage.warmup
    _check_places(plan)


def _check_held(plan: Plan, warmup: int, held: int, where: str) -> None:
    if plan.mode is not PlanMode.SYNC:
        raise OptionError(f"{where}.held: the backward is split in mode sync only")
    if not warmup <= held <= plan.micro_batches:
        raise OptionError(
            f"{where}.held: {held} must lie between its warmup, {warmup}, and micro_batches, "
            f"{plan.micro_batches}"
        )


def _check_tiles(plan: Plan, stage: PlannedStage, where: str) -> None:
    tiling = stage.tiling
    if tiling is None or stage.allocation is not Allocation.TILES:
        raise OptionError(f"{where}: a tiled stage has a grid and groups, and no other has")
    if plan.mode is not PlanMode.SYNC:
        raise OptionError(f"{where}: stages are tiled in mode sync only")
    if stage is not plan.stages[0] or len(plan.stages) < 2:
        raise OptionError(f"{where}: only the first stage is tiled, and others follow it")
    if stage.held is not None:
        raise OptionError(f"{where}.held: the backward of a tiled stage is not split")
    if tiling.units != stage.units[1]:
        raise OptionError(
            f"{where}.groups: they end at layer {tiling.units}, the stage at {stage.units[1]}"
        )
    found = sum(device.share for device in stage.devices)
    if found != tiling.tiles or any(device.share < 1 for device in stage.devices):
        raise OptionError(f"{where}.devices: they have {found} tiles of {tiling.tiles}")


def _check_shares(plan: Plan, stage: PlannedStage, where: str) -> None:
    if not stage.devices:
        raise OptionError(f"{where}.devices: a stage needs at least one device")
    if any(device.share < 1 for device in stage.devices):
        raise OptionError(f"{where}.devices: every share must be at least 1")
    by_samples = stage.allocation is Allocation.SAMPLES
    expected = plan.micro_batch if by_samples else plan.micro_batches
    found = sum(device.share for device in stage.devices)
    if found != expected:
        what = "micro_batch" if by_samples else "micro_batches"
        raise OptionError(f"{where}.devices: shares sum to {found}, not to {what} = {expected}")


def _check_places(plan: Plan) -> None:
    """No device twice, but one device alone in the first and in the last stage (`--private`)."""
    placed: dict[str, int] = {}
    last = len(plan.stages) - 1
    for i, stage in enumerate(plan.stages):
        for device in stage.devices:
            before = placed.setdefault(device.name, i)
            alone = len(stage.devices) == 1 and len(plan.stages[before].devices) == 1
            alone |= len(stage.devices) == 1 and plan.stages[before].tiling is not None
            if before != i and not (before == 0 and i == last and alone):
                raise OptionError(
                    f'plan.stages[{i}].devices: "{device.name}" stands in stage {before} already; '
                    "only the holder may stand twice, in the first and in the last stage, and a "
                    "device with tiles may have the last one"
                )
        if len({device.name for device in stage.devices}) != len(stage.devices):
            raise OptionError(f"plan.stages[{i}].devices: a device is listed twice")
    seen: set[str] = set()
    for out in plan.left_out:
        if out.name in placed:
            raise OptionError(f'plan.left_out: "{out.name}" stands in stage {placed[out.name]}')
        if out.name in seen:
            raise OptionError(f'plan.left_out: "{out.name}" is listed twice')
        seen.add(out.name)


def _batch_size(micro_batch: int, micro_batches: int, predicted: Predicted) -> int:
    full = micro_batch * micro_batches
    samples = predicted.round_seconds * predicted.samples_per_s
    if not full - micro_batch < samples < full:
        return full
    exact = abs(samples - round(samples)) <= 1e-6 * samples
    return round(samples) if exact else full


def _stage(value: object, where: str) -> PlannedStage:
    optional = ("allocation", "held", "ahead", "turn", "bucket_bytes", *_TILED, *_OF_OLDER_FILES)
    entry = json_fields.members(value, where, ("units", "devices", "warmup"), optional)
    units = json_fields.items(entry["units"], f"{where}.units")
    if len(units) != 2:
        raise OptionError(f"{where}.units: expected [first, end), found {len(units)} numbers")
    first, end = (json_fields.whole(unit, f"{where}.units[{i}]") for i, unit in enumerate(units))
    devices = json_fields.items(entry["devices"], f"{where}.devices")
    return PlannedStage(
        units=(first, end),
        devices=tuple(_share(d, f"{where}.devices[{i}]") for i, d in enumerate(devices)),
        warmup=json_fields.whole(entry["warmup"], f"{where}.warmup", least=1),
        allocation=_allocation(entry.get("allocation", "samples"), f"{where}.allocation"),
        held=json_fields.whole(entry["held"], f"{where}.held", least=1)
        if "held" in entry
        else None,
        tiling=_tiling(entry, where) if any(name in entry for name in _TILED) else None,
        goes_ahead=json_fields.truth(entry.get("ahead", False), f"{where}.ahead"),
        turn=json_fields.whole(entry["turn"], f"{where}.turn", least=1)
        if "turn" in entry
        else None,
        bucket_bytes=json_fields.whole(
            entry.get("bucket_bytes", USUAL.least_bytes), f"{where}.bucket_bytes", least=1
        ),
    )


_TILED = ("grid", "groups", "rows", "columns", "aligned", "early")

_OF_OLDER_FILES = ("compression", "interiors")
"""Read and not used."""


def _tiling(entry: Mapping[str, Any], where: str) -> TileShape:
    """The grid and the groups; without `rows` and `columns` all tiles are alike."""
    if "grid" not in entry or "groups" not in entry:
        raise OptionError(f"{where}: a tiled stage has a grid and groups")
    grid = [
        json_fields.whole(size, f"{where}.grid[{i}]", least=1)
        for i, size in enumerate(json_fields.items(entry["grid"], f"{where}.grid"))
    ]
    if len(grid) != 2:
        raise OptionError(f"{where}.grid: expected [rows, columns], found {len(grid)} numbers")
    if grid[0] * grid[1] > MAX_TILES:  # before there is a part for each row and column
        raise OptionError(f"{where}.grid: at most {MAX_TILES} tiles, found {grid[0] * grid[1]}")
    parts = [
        _parts(entry.get(name, [1.0 / size] * size), size, f"{where}.{name}")
        for name, size in zip(("rows", "columns"), grid, strict=True)
    ]
    aligned = json_fields.truth(entry.get("aligned", True), f"{where}.aligned")
    borders = _borders(json_fields.items(entry["groups"], f"{where}.groups"), f"{where}.groups")
    early = tuple(
        json_fields.whole(border, f"{where}.early[{i}]", least=1)
        for i, border in enumerate(json_fields.items(entry.get("early", []), f"{where}.early"))
    )
    return TileShape(parts[0], parts[1], borders, aligned, early)


def _parts(value: object, count: int, where: str) -> tuple[float, ...]:
    given = json_fields.items(value, where)
    if len(given) != count:
        raise OptionError(f"{where}: expected {count} numbers, found {len(given)}")
    return tuple(
        float(json_fields.number(part, f"{where}[{i}]", above_zero=True))
        for i, part in enumerate(given)
    )


def _borders(groups: list[Any], where: str) -> tuple[int, ...]:
    borders = [0]
    for i, group in enumerate(groups):
        ends = [
            json_fields.whole(n, f"{where}[{i}]") for n in json_fields.items(group, f"{where}[{i}]")
        ]
        if len(ends) != 2 or ends[0] != borders[-1] or ends[1] <= ends[0]:
            raise OptionError(f"{where}[{i}]: groups [first, end) follow each other from 0 on")
        borders.append(ends[1])
    return tuple(borders)


def _mode(value: object, where: str) -> PlanMode:
    name = json_fields.text(value, where)
    if name not in set(PlanMode):
        raise OptionError(f'{where}: "{name}" is not known here (known: {", ".join(PlanMode)})')
    return PlanMode(name)


def _allocation(value: object, where: str) -> Allocation:
    name = json_fields.text(value, where)
    if name not in set(Allocation):
        known = ", ".join(Allocation)
        raise OptionError(f'{where}: "{name}" is not known here (known: {known})')
    return Allocation(name)


def _share(value: object, where: str) -> DeviceShare:
    entry = json_fields.members(value, where, ("name", "share"))
    name = json_fields.text(entry["name"], f"{where}.name")
    return DeviceShare(name, json_fields.whole(entry["share"], f"{where}.share", least=1))


def _predicted(value: object, where: str) -> Predicted:
    entry = json_fields.members(value, where, ("round_seconds", "samples_per_s", "peak_bytes"))
    peaks = entry["peak_bytes"]
    if not isinstance(peaks, dict):
        raise OptionError(f"{where}.peak_bytes: expected bytes by device name")
    return Predicted(
        round_seconds=_computed(entry["round_seconds"], f"{where}.round_seconds"),
        samples_per_s=_computed(entry["samples_per_s"], f"{where}.samples_per_s"),
        peak_bytes={
            json_fields.text(name, f"{where}.peak_bytes"): json_fields.whole(
                peak, f'{where}.peak_bytes["{name}"]'
            )
            for name, peak in peaks.items()
        },
    )


def _computed(value: object, where: str) -> float:
    return json_fields.number(value, where, most=json_fields.LARGEST)


def _left_out(value: object, where: str) -> LeftOut:
    entry = json_fields.members(value, where, ("name", "reason"))
    reason = entry["reason"]
    if not isinstance(reason, str):  # a text to be shown: any, even an empty one
        raise OptionError(f"{where}.reason: expected a text")
    return LeftOut(json_fields.text(entry["name"], f"{where}.name"), one_line(reason))


def _stage_to_json(stage: PlannedStage) -> dict[str, Any]:
    content: dict[str, Any] = {
        "units": list(stage.units),
        "devices": [{"name": device.name, "share": device.share} for device in stage.devices],
        "warmup": stage.warmup,
    }
    if stage.allocation is not Allocation.SAMPLES:
        content["allocation"] = str(stage.allocation)
    if stage.held is not None:
        content["held"] = stage.held
    if stage.goes_ahead:
        content["ahead"] = True
    if stage.turn is not None:
        content["turn"] = stage.turn
    if stage.bucket_bytes != USUAL.least_bytes:
        content["bucket_bytes"] = stage.bucket_bytes
    if stage.tiling is not None:
        tiling = stage.tiling
        content["grid"] = list(tiling.grid)
        content["groups"] = [list(group) for group in pairwise(tiling.borders)]
        content["rows"], content["columns"] = list(tiling.rows), list(tiling.columns)
        content["aligned"] = tiling.aligned
        if tiling.early:
            content["early"] = list(tiling.early)
    return content


Direction = Literal["output", "gradient"]
