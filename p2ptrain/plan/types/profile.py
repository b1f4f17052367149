"""What a model costs, unit by unit: the file `p2ptrain.profile/1`.

How large units are where they are kept, updated, copied and sent, `StateBytes` says: what is not
trained has no gradient, no state of the optimizer, and never changes.

    weights, all      |== frozen ==|== trained ==|
    gradients                      |== trained ==|
    optimizer state                |== trained ==| x optimizer_state_ratio

Every rule of that kind stands there; planners, copies and migrations only add up units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By, Local
from p2ptrain.net.read_form import shown
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.plan.types.planning_file import (
    MANY,
    Name,
    Number,
    Whole,
    WholeAboveZero,
    read_file,
    write_file,
)
from p2ptrain.plan.types.unit_times import Times


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Of some units.

    Attributes:
        parameter_bytes: of all their weights.
        trainable_bytes: of those that take gradients.
        optimizer_state_ratio: optimizer bytes per trained byte.
    """

    parameter_bytes: int
    trainable_bytes: int
    optimizer_state_ratio: float = 0.0

    @property
    def frozen_bytes(self) -> int:
        """Of weights that never change: a device has them once, however many versions it keeps."""
        return self.parameter_bytes - self.trainable_bytes

    @property
    def trained(self) -> float:
        """What a device that trains them holds: weights, gradients and optimizer state."""
        return self.parameter_bytes + self.trainable_bytes * (1 + self.optimizer_state_ratio)

    @property
    def held_bytes(self) -> int:
        """The same, rounded up."""
        return math.ceil(self.trained)

    @property
    def changing_bytes(self) -> int:
        """What an update changes, and each further version repeats: rounded up."""
        return math.ceil(self.trainable_bytes * (1 + self.optimizer_state_ratio))

    @property
    def version_bytes(self) -> int:
        """One whole version: what a device needs that has none of it."""
        return self.frozen_bytes + self.changing_bytes

    @property
    def summed_bytes(self) -> int:
        """What a group adds up: the gradients."""
        return self.trainable_bytes


FORMAT = "p2ptrain.profile/1"

Pair = tuple[int, int]
"""(rows, columns)."""


def _read_pair(value: Any) -> Pair:
    both = value if isinstance(value, list) else [value, value]
    if len(both) != 2 or any(type(one) is not int or one < 0 for one in both):
        raise ValueError(f"expected one whole number or two, found {shown(value)}")
    rows, columns = both
    return rows, columns


def _write_pair(pair: Pair) -> int | list[int]:
    rows, columns = pair
    return rows if rows == columns else [rows, columns]


OneOrTwo: TypeAlias = Annotated[Pair, By(_read_pair, _write_pair)]


@dataclass(frozen=True, slots=True)
class Spatial:
    """Geometry of a unit that can be cut into tiles, each as (rows, columns)."""

    kernel: OneOrTwo
    stride: OneOrTwo
    padding: OneOrTwo
    dilation: OneOrTwo
    height: WholeAboveZero
    width: WholeAboveZero

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "dilation"):
            if min(getattr(self, name)) < 1:
                raise OptionError(f"{name}: expected at least 1")


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of the model; bytes and flops are per sample, but those of parameters.

    Attributes:
        parameter_bytes: of all its parameters.
        output_bytes: what crosses a cut after the unit, all tensors.
        activation_bytes: what is kept for the backward.
        flops: to be shown; nothing is computed from it.
        trainable_bytes: of those of its parameters that take gradients; None: all of them do.
        passing_bytes: what its forward or backward takes for a moment beside what is kept.
    """

    former_keys: ClassVar = frozenset({"compression"})

    name: Name
    parameter_bytes: Whole
    output_bytes: Whole
    activation_bytes: Whole
    flops: Whole = 0
    spatial: Spatial | None = None
    trainable_bytes: Whole | None = None
    passing_bytes: Whole | None = None

    def __post_init__(self) -> None:
        if self.trained_bytes > self.parameter_bytes:
            raise OptionError(
                f"trainable_bytes: {self.trainable_bytes} are more than the "
                f"{self.parameter_bytes} bytes of all its parameters"
            )

    @property
    def trained_bytes(self) -> int:
        """Of the parameters that take gradients."""
        return self.parameter_bytes if self.trainable_bytes is None else self.trainable_bytes


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's units and their times on the reference device.

    Attributes:
        input_bytes, target_bytes: per sample, as the holder sends them.
        optimizer_state_ratio: optimizer bytes per trained byte.
        maps: of the first units, which can be cut into tiles, as the model itself has them; in no
            file, whose units say `spatial` instead.
    """

    model: Name
    input_bytes: Whole
    target_bytes: Whole
    units: Annotated[tuple[Unit, ...], MANY]
    optimizer_state_ratio: Number
    times: Times
    maps: Annotated[MapNetwork | None, Local()] = None

    def __post_init__(self) -> None:
        if not self.units:
            raise OptionError("units: a model needs at least one unit")
        if self.times.unit_count != len(self.units):
            raise OptionError(
                f"times: {self.times.unit_count} times a batch size for {len(self.units)} units"
            )

    def state(self, first: int, end: int) -> StateBytes:
        """How large units [first, end) are, apart from samples."""
        units = self.units[first:end]
        return StateBytes(
            sum(unit.parameter_bytes for unit in units),
            sum(unit.trained_bytes for unit in units),
            self.optimizer_state_ratio,
        )

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return write_file(self, FORMAT)

    @classmethod
    def from_json(cls, value: object, where: str = "profile") -> Profile:
        """Read the file's content; OptionError names the field that is missing or wrong."""
        return read_file(cls, FORMAT, value, where)
