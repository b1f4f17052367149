"""How a tensor's elements lie in memory, and what of that memory has to travel.

Strides travel with a tensor because operators choose their algorithm by them: a contiguous copy of
a channels-last activation gives other rounding further on. Three cases:

    dense in some permutation of the dimensions   the memory itself travels, uncopied
    stride 0 in some dimensions (expand)          one element of each such dimension travels
    anything else (slices, overlapping windows)   the values travel, and are scattered on arrival

Pure: only sizes, no tensors, so that a command line that names a `WireFormat` needs no torch. A
peer's numbers are checked here before memory is taken for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from math import prod

from p2ptrain.errors import ProtocolError


class WireFormat(StrEnum):
    """How floating-point values travel, a job's choice: exactly, or as `rounding` says."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"


ALIGNMENT = 64
"""Bytes to which torch aligns what it allocates; kernels round differently off this grid."""

DIMENSIONS_LIMIT = 64
"""torch's own limit."""

STRIDE_LIMIT = 2**40
"""Largest stride in elements, also where it has no effect (in dimensions of size 1)."""

SPREAD_LIMIT = 1024

SPREAD_LIMIT_BYTES = 64 * 2**20

DENSE_FACTOR = 4
"""A view may span DENSE_FACTOR times its values' bytes; or SPREAD_LIMIT times, but then at most
SPREAD_LIMIT_BYTES. Without it a peer could make us allocate by sending one small part with large
strides. What exceeds it is sent dense: a view that sparse (one token of 1024) is rare."""


@dataclass(frozen=True)
class TensorLayout:
    """Shape and strides, both in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @cached_property
    def compact_shape(self) -> tuple[int, ...]:
        """The shape of what travels: dimensions that repeat one element count once."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(1 if stride == 0 and size > 1 else size for size, stride in pairs)

    @cached_property
    def compact_elements(self) -> int:
        """Elements that travel."""
        return prod(self.compact_shape)

    @cached_property
    def extent(self) -> int:
        """Elements from the first to the last in memory, both included."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)

    @cached_property
    def is_dense(self) -> bool:
        """Whether what travels fills its extent: then its memory can be sent as it is."""
        expected = 1
        for stride, size in sorted(self._spread()):
            if stride != expected:
                return False
            expected *= size
        return True

    def is_within_limits(self, itemsize: int) -> bool:
        """Whether a receiver takes it; see `SPREAD_LIMIT`."""
        value_bytes = self.compact_elements * itemsize
        spread = min(SPREAD_LIMIT * value_bytes, SPREAD_LIMIT_BYTES)
        return (
            self.extent * itemsize <= max(DENSE_FACTOR * value_bytes, spread)
            and max(self.strides, default=0) <= STRIDE_LIMIT
            and len(self.shape) <= DIMENSIONS_LIMIT
        )

    def densified(self) -> TensorLayout:
        """The same order of dimensions in memory, without gaps, overlaps or repetition."""
        order = sorted(range(len(self.shape)), key=lambda d: (self.strides[d], -d))
        strides = [0] * len(self.shape)
        step = 1
        for d in order:
            strides[d] = step
            step *= max(self.shape[d], 1)
        return TensorLayout(self.shape, tuple(strides))

    def _spread(self) -> list[tuple[int, int]]:
        """(stride, size) of the dimensions in which elements lie apart."""
        if 0 in self.shape:
            return []
        return [
            (stride, size)
            for stride, size in zip(self.strides, self.compact_shape, strict=True)
            if size > 1
        ]


@lru_cache(maxsize=1024)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorLayout:
    """A layout that was worked out before: a stage's tensors have the same ones in every round."""
    return TensorLayout(shape, strides)


def checked_layout(
    shape: object, strides: object, expected_shape: Sequence[int], itemsize: int
) -> TensorLayout:
    """A peer's shape and strides as a layout.

    Raises:
        ProtocolError: not the expected shape, or strides that no sender of ours would send. The
            message never shows them: a number may be too long to print.
    """
    if shape != list(expected_shape) or not _are_counts(shape):
        raise ProtocolError(f"a tensor of shape {list(expected_shape)} was expected")
    if not _are_counts(strides) or len(strides) != len(expected_shape):  # type: ignore[arg-type]
        raise ProtocolError(f"a tensor of shape {list(expected_shape)} has no such strides")
    layout = layout_of(tuple(expected_shape), tuple(strides))  # type: ignore[arg-type]
    if not layout.is_within_limits(itemsize):
        raise ProtocolError(f"a tensor of shape {list(expected_shape)} lies too sparsely")
    return layout


def _are_counts(values: object) -> bool:
    """Whether it is a list of whole numbers from 0. Booleans are integers to Python: refused."""
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
