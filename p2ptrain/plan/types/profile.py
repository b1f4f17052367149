"""What a model costs, unit by unit: the file `p2ptrain.profile/1`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from p2ptrain.errors import OptionError
from p2ptrain.plan.types import json_fields
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.plan.types.unit_times import TimeTable

FORMAT = "p2ptrain.profile/1"

Pair = tuple[int, int]
"""(rows, columns)."""


@dataclass(frozen=True, slots=True)
class Spatial:
    """Geometry of a unit that can be cut into tiles, each as (rows, columns)."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of the model; bytes and flops are per sample, but `parameter_bytes`.

    Attributes:
        output_bytes: what crosses a cut after the unit, all tensors.
        activation_bytes: what is kept for the backward.
        flops: to be shown; nothing is computed from it.
    """

    name: str
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    flops: int = 0
    spatial: Spatial | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's units and their times on the reference device.

    Attributes:
        input_bytes, target_bytes: per sample, as the holder sends them.
        optimizer_state_ratio: optimizer bytes per parameter byte.
        maps: of the first units, which can be cut into tiles, as the model itself has them; in no
            file, whose units say `spatial` instead.
    """

    model: str
    input_bytes: int
    target_bytes: int
    units: tuple[Unit, ...]
    optimizer_state_ratio: float
    times: TimeTable
    maps: MapNetwork | None = None

    def __post_init__(self) -> None:
        if not self.units:
            raise OptionError("profile.units: a model needs at least one unit")
        if self.times.unit_count != len(self.units):
            raise OptionError(
                f"profile.times: {self.times.unit_count} times a batch size for "
                f"{len(self.units)} units"
            )

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "format": FORMAT,
            "model": self.model,
            "input_bytes": self.input_bytes,
            "target_bytes": self.target_bytes,
            "units": [_unit_to_json(unit) for unit in self.units],
            "optimizer_state_ratio": self.optimizer_state_ratio,
            "times": self.times.to_json(),
        }

    @classmethod
    def from_json(cls, value: object, where: str = "profile") -> Profile:
        """Read the file's content; OptionError names the field that is missing or wrong."""
        json_fields.file_format(value, where, FORMAT)
        required = ("format", "model", "input_bytes", "target_bytes", "units")
        entry = json_fields.members(value, where, (*required, "optimizer_state_ratio", "times"))
        units = json_fields.items(entry["units"], f"{where}.units")
        ratio = entry["optimizer_state_ratio"]
        return cls(
            model=json_fields.text(entry["model"], f"{where}.model"),
            input_bytes=json_fields.whole(entry["input_bytes"], f"{where}.input_bytes"),
            target_bytes=json_fields.whole(entry["target_bytes"], f"{where}.target_bytes"),
            units=tuple(_unit(unit, f"{where}.units[{i}]") for i, unit in enumerate(units)),
            optimizer_state_ratio=json_fields.number(ratio, f"{where}.optimizer_state_ratio"),
            times=TimeTable.from_json(entry["times"], f"{where}.times"),
        )


def _unit(value: object, where: str) -> Unit:
    required = ("name", "parameter_bytes", "output_bytes", "activation_bytes")
    optional = ("flops", "spatial", "compression")  # the last of older files: read and not used
    entry = json_fields.members(value, where, required, optional)
    return Unit(
        name=json_fields.text(entry["name"], f"{where}.name"),
        parameter_bytes=json_fields.whole(entry["parameter_bytes"], f"{where}.parameter_bytes"),
        output_bytes=json_fields.whole(entry["output_bytes"], f"{where}.output_bytes"),
        activation_bytes=json_fields.whole(entry["activation_bytes"], f"{where}.activation_bytes"),
        flops=json_fields.whole(entry.get("flops", 0), f"{where}.flops"),
        spatial=_spatial(entry["spatial"], f"{where}.spatial") if "spatial" in entry else None,
    )


def _spatial(value: object, where: str) -> Spatial:
    windows = ("kernel", "stride", "padding", "dilation")
    entry = json_fields.members(value, where, (*windows, "height", "width"))
    return Spatial(
        kernel=_pair(entry["kernel"], f"{where}.kernel", least=1),
        stride=_pair(entry["stride"], f"{where}.stride", least=1),
        padding=_pair(entry["padding"], f"{where}.padding", least=0),
        dilation=_pair(entry["dilation"], f"{where}.dilation", least=1),
        height=json_fields.whole(entry["height"], f"{where}.height", least=1),
        width=json_fields.whole(entry["width"], f"{where}.width", least=1),
    )


def _pair(value: object, where: str, least: int) -> Pair:
    if not isinstance(value, list):
        both = json_fields.whole(value, where, least=least)
        return both, both
    if len(value) != 2:
        raise OptionError(f"{where}: expected one number or two, found {len(value)}")
    rows, columns = (
        json_fields.whole(v, f"{where}[{i}]", least=least) for i, v in enumerate(value)
    )
    return rows, columns


def _unit_to_json(unit: Unit) -> dict[str, Any]:
    entry = asdict(unit)
    if unit.spatial is None:
        del entry["spatial"]
    else:
        entry["spatial"] = {key: _plain(value) for key, value in entry["spatial"].items()}
    return entry


def _plain(value: int | Pair) -> int | list[int]:
    if isinstance(value, int):
        return value
    rows, columns = value
    return rows if rows == columns else [rows, columns]
