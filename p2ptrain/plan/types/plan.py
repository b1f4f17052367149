"""What is decided: which device computes which units, how deep, and what that should cost.

The file `p2ptrain.plan/1`. `Plan.from_json` refuses what can never be a plan;
`plan/cost/check_plan.py` holds a plan against a profile and a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from p2ptrain import markup
from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By, Range, Rare, Seconds, Text
from p2ptrain.plan.types.allocation import MAX_TILES, Allocation, BatchSplit, TileShape
from p2ptrain.plan.types.gradient_sums import MAX_BYTES, USUAL
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.planning_file import (
    MANY,
    Factor,
    Name,
    Whole,
    WholeAboveZero,
    read_file,
    write_file,
)
from p2ptrain.plan.types.request import PlanMode

FORMAT = "p2ptrain.plan/1"

TEXT_CHARACTERS = 100_000
"""Of a reason."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A device's part of a stage; what `share` counts, the stage's allocation says."""

    name: Name
    share: WholeAboveZero


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
class _StageFile:
    """A stage in a file, which may lack the widths of its tiles: all are alike then."""

    former_keys: ClassVar = frozenset({"compression", "interiors"})

    units: tuple[Whole, Whole]
    devices: Annotated[tuple[DeviceShare, ...], MANY]
    warmup: WholeAboveZero
    allocation: Annotated[Allocation, Rare()] = Allocation.SAMPLES
    held: WholeAboveZero | None = None
    ahead: Annotated[bool, Rare()] = False
    turn: WholeAboveZero | None = None
    bucket_bytes: Annotated[int, Range(1, MAX_BYTES)] | None = None
    grid: tuple[WholeAboveZero, WholeAboveZero] | None = None
    groups: Annotated[tuple[tuple[Whole, Whole], ...], MANY] | None = None
    rows: Annotated[tuple[Factor, ...], MANY] | None = None
    columns: Annotated[tuple[Factor, ...], MANY] | None = None
    aligned: bool | None = None
    early: Annotated[tuple[WholeAboveZero, ...], MANY] | None = None


def _planned(listed: _StageFile) -> PlannedStage:
    return PlannedStage(
        listed.units,
        listed.devices,
        listed.warmup,
        listed.allocation,
        listed.held,
        _tiling(listed),
        listed.ahead,
        listed.turn,
        listed.bucket_bytes or USUAL.least_bytes,
    )


def _tiling(listed: _StageFile) -> TileShape | None:
    if listed.grid is None or listed.groups is None:
        tiled = ("grid", "groups", "rows", "columns", "aligned", "early")
        if any(getattr(listed, name) is not None for name in tiled):
            raise OptionError("a tiled stage has a grid and groups")
        return None
    if listed.grid[0] * listed.grid[1] > MAX_TILES:  # before there is a part for each of them
        raise OptionError(
            f"grid: at most {MAX_TILES} tiles, found {listed.grid[0] * listed.grid[1]}"
        )
    rows, columns = (
        (1.0 / size,) * size if parts is None else parts
        for parts, size in zip((listed.rows, listed.columns), listed.grid, strict=True)
    )
    if (len(rows), len(columns)) != listed.grid:
        raise OptionError(f"expected {listed.grid[0]} rows and {listed.grid[1]} columns")
    borders = (0, *(end for _, end in listed.groups))
    if tuple(pairwise(borders)) != listed.groups:
        raise OptionError("groups: [first, end) follow each other from 0 on")
    return TileShape(rows, columns, borders, listed.aligned is not False, listed.early or ())


def _listed(stage: PlannedStage) -> _StageFile:
    usual = stage.bucket_bytes == USUAL.least_bytes
    listed = _StageFile(
        stage.units,
        stage.devices,
        stage.warmup,
        stage.allocation,
        stage.held,
        stage.goes_ahead,
        stage.turn,
        None if usual else stage.bucket_bytes,
    )
    tiling = stage.tiling
    if tiling is None:
        return listed
    return replace(
        listed,
        grid=tiling.grid,
        groups=tuple(pairwise(tiling.borders)),
        rows=tiling.rows,
        columns=tiling.columns,
        aligned=tiling.aligned,
        early=tiling.early or None,
    )


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plain cost model says of one round.

    Attributes:
        peak_bytes: by device, of the memory that it computes in.
        host_peak_bytes: of the host's, of devices with an accelerator that has its own memory.
    """

    round_seconds: Seconds
    samples_per_s: Seconds
    peak_bytes: Annotated[Mapping[str, Whole], MANY]
    host_peak_bytes: Annotated[Mapping[str, Whole], MANY] | None = None

    def needed(self, device: str) -> MemoryBudgets:
        """Of each memory of a device, by name; nothing of one that has no part."""
        host = self.host_peak_bytes or {}
        return MemoryBudgets(self.peak_bytes.get(device, 0), host.get(device))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A device that takes no part, and why."""

    name: Name
    reason: Annotated[str, Text(TEXT_CHARACTERS, clean=True)]


@dataclass(frozen=True, slots=True)
class _PlanFile:
    planner: Name
    micro_batch: WholeAboveZero
    micro_batches: WholeAboveZero
    stages: Annotated[tuple[Annotated[PlannedStage, By(_planned, _listed, _StageFile)], ...], MANY]
    predicted: Predicted
    left_out: Annotated[tuple[LeftOut, ...], MANY]
    found_by: Name | None = None
    mode: Annotated[PlanMode, Rare()] = PlanMode.SYNC
    mode_reason: Annotated[str, Text(TEXT_CHARACTERS), Rare()] = ""


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
    found_by: str | None = None
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

    def _repr_html_(self) -> str:
        """In notebooks."""
        return markup.plan(
            f"{self.found_by or self.planner}: {self.micro_batches} x {self.micro_batch} samples, "
            f"about {markup.rounded(self.predicted.samples_per_s)} samples/s",
            ((stage.units, [(d.name, d.share) for d in stage.devices]) for stage in self.stages),
            [(out.name, out.reason) for out in self.left_out],
        )

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        listed = {field.name: getattr(self, field.name) for field in fields(_PlanFile)}
        return write_file(_PlanFile(**listed), FORMAT)

    @classmethod
    def from_json(cls, value: object, where: str = "plan", batch_size: int | None = None) -> Plan:
        """Read the file's content; OptionError names the field that is missing or wrong.

        The file does not hold the batch size. Without `batch_size` it follows from `predicted`
        where that fits the number of micro-batches, else the last micro-batch is a full one.
        """
        listed = read_file(_PlanFile, FORMAT, value, where)
        size, count = listed.micro_batch, listed.micro_batches
        if listed.mode is PlanMode.ASYNC:
            batch_size = size * count  # whatever travels together, a whole mini-batch or a piece
        split = BatchSplit(batch_size or _batch_size(size, count, listed.predicted), size).checked()
        if split.micro_batches != count:
            raise OptionError(
                f"{where}.micro_batches: {count}, but {split.batch_size} samples are "
                f"{split.micro_batches} micro-batches of {size}"
            )
        shared = {f.name: getattr(listed, f.name) for f in fields(cls) if f.name != "split"}
        return cls(split=split, **shared)


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


Direction = Literal["output", "gradient"]
