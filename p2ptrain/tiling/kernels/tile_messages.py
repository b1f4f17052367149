"""The messages between tiles during one pass: everything that a network has to carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Halo:
    """A region of a map that enters a group, on the way forward.

    The layout's transfer with the same group, map, sender and receiver says which region.
    """

    group: int
    map: int


@dataclass(frozen=True, slots=True)
class HaloGradient:
    """The gradient of what `Halo` brought, on the way back to its owner."""

    group: int
    map: int


@dataclass(frozen=True, slots=True)
class Moments:
    """A tile's sums for an operation that normalises: see `normalisation`."""

    operation: int


@dataclass(frozen=True, slots=True)
class GradientSums:
    """A tile's two sums for the backward of an operation that normalises."""

    operation: int


Subject: TypeAlias = Halo | HaloGradient | Moments | GradientSums


@dataclass(frozen=True, slots=True)
class TileMessage:
    """From one tile to another.

    Attributes:
        sender, receiver: tiles.
        subject: what it is; one message each for a (subject, sender, receiver) of a pass.
        tensor: samples x channels x rows x columns; of sums 2 x channels, float64.
    """

    sender: int
    receiver: int
    subject: Subject
    tensor: Tensor
