"""What is known of a value before it exists: its type, and its shape as a function of the batch.

Devices allocate what they are about to receive from this, never from what a peer claims. Shapes are
polynomials in the batch size because exported models only ever multiply and add it (`B`, `197*B`,
`B*B` for in-batch similarities); anything else is no cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAXIMUM_DEGREE = 2
"""Highest power of the batch size in a dimension that may cross a cut."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A whole number that depends on the batch size B: `sum(coefficients[k] * B**k)`.

    Attributes:
        coefficients: lowest power first; 1 to `MAXIMUM_DEGREE` + 1 of them, the last not 0 unless
            it is the only one.
    """

    coefficients: tuple[int, ...]

    def __call__(self, batch: int) -> int:
        """The number for `batch` samples."""
        return sum(c * batch**power for power, c in enumerate(self.coefficients))

    @property
    def is_constant(self) -> bool:
        """Whether it is the same for every batch size."""
        return len(self.coefficients) == 1

    def batch_for(self, size: int) -> int | None:
        """The batch size at which a linear polynomial gives `size`; None if it gives none."""
        if len(self.coefficients) != 2:
            return None
        constant, slope = self.coefficients
        batch, rest = divmod(size - constant, slope)
        return batch if rest == 0 and batch >= 0 else None


BATCH = Polynomial((0, 1))
"""The batch size itself."""


@dataclass(frozen=True, slots=True)
class ValueDescription:
    """One tensor that enters, crosses or leaves the model.

    Whole numbers that follow from the batch size never cross a cut: every stage computes them for
    the samples that it has.

    Attributes:
        name: unique within its graph.
        dtype: element type.
        dimensions: one polynomial a dimension, in the batch size.
        may_require_grad: False means that no gradient ever flows through it.
    """

    name: str
    dtype: torch.dtype
    dimensions: tuple[Polynomial, ...]
    may_require_grad: bool

    def shape(self, batch: int) -> tuple[int, ...]:
        """Its shape for `batch` samples."""
        return tuple(dimension(batch) for dimension in self.dimensions)

    def nbytes(self, batch: int) -> int:
        """Bytes of its elements for `batch` samples, each counted once whatever its strides."""
        size = self.dtype.itemsize
        for dimension in self.dimensions:
            size *= dimension(batch)
        return size

    def batch_of(self, shape: tuple[int, ...]) -> int | None:
        """The batch size that a tensor of `shape` was computed for; None where it cannot tell."""
        for dimension, size in zip(self.dimensions, shape, strict=True):
            batch = dimension.batch_for(size)
            if batch is not None:
                return batch
        return None

    @property
    def depends_on_batch(self) -> bool:
        """Whether `batch_of` can tell."""
        return any(len(dimension.coefficients) == 2 for dimension in self.dimensions)


CROSSING_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""Element types of what may travel."""


def sample_dimension(value: ValueDescription) -> int | None:
    """The dimension along which `value` can be cut between samples.

    Returns:
        The only dimension that depends on the batch, where it is exactly the batch size; None where
        there is no such dimension: the value cannot be divided.
    """
    varying = [k for k, d in enumerate(value.dimensions) if not d.is_constant]
    if len(varying) != 1 or value.dimensions[varying[0]] != BATCH:
        return None
    return varying[0]
