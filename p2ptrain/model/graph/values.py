"""What is known of a value before it exists: its type, and its shape as a function of the batch.

Devices allocate what they are about to receive from this, never from what a peer claims. Shapes are
polynomials in the batch size and in the lengths that differ from batch to batch, because exported
models only ever multiply and add them (`B`, `197*B`, `B*L`, `B*B` for in-batch similarities);
anything else is no cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, TypeAlias

import torch

from p2ptrain.net.forms import By, Length, Range, Row, Text

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

ELEMENTS_LIMIT = 1 << 38
"""Most elements of one tensor, and the largest size: 1 TiB of float32, more than any device has."""

DIMENSIONS_LIMIT = 16

MAXIMUM_DEGREE = 2
"""Highest power of the batch size, and of a length, in a dimension that may cross a cut."""

MOST_LENGTHS = 4
"""Sizes, besides that of the batch, that may differ from batch to batch."""


Name: TypeAlias = Annotated[str, Text(512)]

_Coefficient: TypeAlias = Annotated[int, Range(-ELEMENTS_LIMIT, ELEMENTS_LIMIT)]


def _named(value: object) -> str:
    return str(value).removeprefix("torch.")


def one_of(*values: Any) -> By:
    """Of values of torch, such as `torch.float32`: it travels as "float32"."""
    known = {_named(value): value for value in values}

    def read(name: str) -> Any:
        if name not in known:
            raise ValueError("a type is unknown")
        return known[name]

    return By(read, _named, Annotated[str, Text(32)])


DType: TypeAlias = Annotated[torch.dtype, one_of(*CROSSING_DTYPES)]


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a polynomial with a length in it: `coefficient * B**powers[0] * L0**powers[1] ...`.

    Attributes:
        powers: of the batch size, then of the lengths; the last one is not 0.
    """

    coefficient: _Coefficient
    powers: Annotated[
        tuple[Annotated[int, Range(0, MAXIMUM_DEGREE)], ...], Length(MOST_LENGTHS + 1, 2)
    ]

    def __call__(self, sizes: Sequence[int]) -> int:
        """Its value."""
        powers = (int(n**p) for n, p in zip(sizes, self.powers, strict=False))
        return self.coefficient * prod(powers)


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A whole number that depends on the batch size B: `sum(coefficients[k] * B**k)`.

    Attributes:
        coefficients: lowest power first; 1 to `MAXIMUM_DEGREE` + 1 of them, the last not 0 unless
            it is the only one.
        terms: what is added to that, with lengths that differ from batch to batch.
    """

    coefficients: tuple[int, ...]
    terms: tuple[Term, ...] = ()

    def __call__(self, batch: int, *lengths: int) -> int:
        """The number for `batch` samples of these lengths."""
        number = sum(int(c * batch**power) for power, c in enumerate(self.coefficients))
        return number + sum(term((batch, *lengths)) for term in self.terms)

    @property
    def is_constant(self) -> bool:
        """Whether it is the same for every batch."""
        return len(self.coefficients) == 1 and not self.terms

    @property
    def depends_on_batch(self) -> bool:
        """Whether it differs with the number of samples."""
        return len(self.coefficients) > 1 or any(term.powers[0] for term in self.terms)

    def batch_for(self, size: int) -> int | None:
        """The batch size at which a linear polynomial gives `size`; None if it gives none."""
        if len(self.coefficients) != 2 or self.terms:
            return None
        constant, slope = self.coefficients
        batch, rest = divmod(size - constant, slope)
        return batch if rest == 0 and batch >= 0 else None

    def solved(self, size: int, known: Sequence[int | None]) -> tuple[int, int] | None:
        """(which size, what it is) where `size` tells one that is not known yet; else None.

        Args:
            known: the batch size and the lengths, as far as they are known.
        """
        every = [Term(c, (power,)) for power, c in enumerate(self.coefficients) if c]
        constant, slopes = 0, dict[int, int]()
        for term in (*every, *self.terms):
            if len(term.powers) > len(known):
                return None
            unknown = [k for k, p in enumerate(term.powers) if p and known[k] is None]
            if len(unknown) > 1 or any(term.powers[k] > 1 for k in unknown):
                return None
            value = term([1 if n is None else n for n in known])
            if unknown:
                slopes[unknown[0]] = slopes.get(unknown[0], 0) + value
            else:
                constant += value
        if len(slopes) != 1:
            return None
        (which, slope), *_ = slopes.items()
        if not slope:
            return None
        found, rest = divmod(size - constant, slope)
        return (which, found) if rest == 0 and found >= 0 else None


def length(number: int) -> Polynomial:
    """That length itself, from 0."""
    return Polynomial((0,), (Term(1, (*[0] * (number + 1), 1)),))


_Terms: TypeAlias = Annotated[tuple[Annotated[Term, Row()], ...], Length(16)]


def _read_polynomial(parts: Sequence[Any]) -> Polynomial:
    *numbers, last = parts
    terms = last if isinstance(last, tuple) else ()
    numbers += [] if isinstance(last, tuple) else [last]
    whole = 1 <= len(numbers) <= MAXIMUM_DEGREE + 1 and all(type(n) is int for n in numbers)
    if not whole or (len(numbers) > 1 and not numbers[-1]) or not all(t.powers[-1] for t in terms):
        raise ValueError("a size is malformed")
    return Polynomial(tuple(numbers), terms)


def _write_polynomial(polynomial: Polynomial) -> list[Any]:
    terms = [[term.coefficient, [*term.powers]] for term in polynomial.terms]
    return [*polynomial.coefficients, *([terms] if terms else [])]


Size: TypeAlias = Annotated[
    Polynomial,
    By(
        *(_read_polynomial, _write_polynomial),
        Annotated[tuple[_Coefficient | _Terms, ...], Length(MAXIMUM_DEGREE + 2, 1)],
    ),
]
"""Its coefficients, then a list of its terms where it has any."""

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

    def shape(self, batch: int, *lengths: int) -> tuple[int, ...]:
        """Its shape for `batch` samples."""
        return tuple(dimension(batch, *lengths) for dimension in self.dimensions)

    def nbytes(self, batch: int, *lengths: int) -> int:
        """Bytes of its elements for `batch` samples, each counted once whatever its strides."""
        return self.dtype.itemsize * prod(self.shape(batch, *lengths))

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


Described: TypeAlias = Annotated[
    ValueDescription,
    By(
        lambda parts: ValueDescription(parts[0], *parts[2:]),
        lambda v: (v.name, "tensor", v.dtype, v.dimensions, v.may_require_grad),
        tuple[
            Name,
            Literal["tensor"],
            DType,
            Annotated[tuple[Size, ...], Length(DIMENSIONS_LIMIT)],
            bool,
        ],
    ),
]


def sizes_of(
    values: Iterable[tuple[ValueDescription, Sequence[int]]], lengths: int
) -> tuple[int | None, ...]:
    """The batch size and the lengths that tensors of these shapes show; None = they do not."""
    known: list[int | None] = [None] * (lengths + 1)
    left = [pair for value, shape in values for pair in zip(value.dimensions, shape, strict=True)]
    while None in known:
        found = [dimension.solved(size, known) for dimension, size in left]
        news = {one[0]: one[1] for one in found if one is not None}
        if not news:
            break
        for which, size in news.items():
            known[which] = size
    return tuple(known)


def shows_sizes(values: Iterable[ValueDescription], lengths: int) -> frozenset[int]:
    """Which of the batch size (0) and the lengths (from 1) tensors so described show."""
    made = [(value, value.shape(*range(7, 8 + lengths))) for value in values]
    return frozenset(k for k, n in enumerate(sizes_of(made, lengths)) if n is not None)


def sample_dimension(value: ValueDescription) -> int | None:
    """The dimension along which `value` can be cut between samples.

    Returns:
        The only dimension that depends on the batch, where it is exactly the batch size; None where
        there is no such dimension: the value cannot be divided.
    """
    varying = [k for k, d in enumerate(value.dimensions) if d.depends_on_batch]
    if len(varying) != 1 or value.dimensions[varying[0]] != BATCH:
        return None
    return varying[0]
