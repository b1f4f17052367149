"""What can be measured: one cell is a system training a model in a household, at one size.

A/mobilenetv2/S/ddp
household / model / size of the mini-batch / system
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

MODELS = ("mobilenetv2", "efficientnet_b1", "resnet50", "vit", "bert_small")
SIZES = ("S", "L")
BATCH_SIZES = {
    "mobilenetv2": {"S": 1024, "L": 2048},
    "efficientnet_b1": {"S": 256, "L": 1024},
    "resnet50": {"S": 64, "L": 256},
    "vit": {"S": 128, "L": 256},
    "bert_small": {"S": 64, "L": 256},
}
"""Samples of a mini-batch."""

RIVALS = ("torch", "ddp", "ddp-default")
"""Plain torch on the best device, DistributedDataParallel with the settings that prove best
and with its own."""
PLANNERS = ("auto", "hybrid", "pp", "dp", "single", "pipedream")
"""Of `p2ptrain train --planner`."""
SYSTEMS = (*RIVALS, *PLANNERS)
HOUSEHOLDS = ("A", "B", "C", "D", "F", "B1000", "P1", "P2", "P3", "P4", "P5", "P6")


class UnknownNameError(ValueError):
    """A filter names something that is not there."""


@dataclass(frozen=True, slots=True)
class Place:
    """A model in a household: what the devices' own speeds depend on."""

    household: str
    model: str

    @property
    def key(self) -> str:
        """As in the results' file."""
        return f"{self.household}/{self.model}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure to measure."""

    household: str
    model: str
    size: str
    system: str

    @property
    def key(self) -> str:
        """As in the results' file."""
        return f"{self.household}/{self.model}/{self.size}/{self.system}"

    @property
    def place(self) -> Place:
        """Its household and model."""
        return Place(self.household, self.model)

    @property
    def batch_size(self) -> int:
        """Samples of a mini-batch."""
        return BATCH_SIZES[self.model][self.size]

    @property
    def is_rival(self) -> bool:
        """Whether it is measured without p2ptrain."""
        return self.system in RIVALS

    @classmethod
    def parse(cls, key: str) -> Cell:
        """The cell of a key. Raises UnknownNameError."""
        parts = key.split("/")
        if len(parts) != 4:
            raise UnknownNameError(f"{key!r} is not HOUSEHOLD/MODEL/SIZE/SYSTEM")
        return cls(*parts)


def select(patterns: Sequence[str], households: Iterable[str] = HOUSEHOLDS) -> list[Cell]:
    """The cells that any of the patterns names, in the order of measuring.

    Args:
        patterns: such as `A/mobilenetv2/S/ddp,pp`: up to four parts, each a list of names or `*`;
            parts that are left out stand for all. No pattern stands for every cell.
        households: that exist.

    Raises:
        UnknownNameError: a part names nothing that exists.
    """
    every = list(_every(tuple(households)))
    if not patterns:
        return every
    wanted = [_parts(pattern, tuple(households)) for pattern in patterns]
    return [cell for cell in every if any(_matches(cell, parts) for parts in wanted)]


def _every(households: Sequence[str]) -> Iterator[Cell]:
    for names in product(households, MODELS, SIZES, SYSTEMS):
        yield Cell(*names)


def _parts(pattern: str, households: Sequence[str]) -> list[set[str]]:
    known = (("household", households), ("model", MODELS), ("size", SIZES), ("system", SYSTEMS))
    given = pattern.split("/")
    if len(given) > len(known):
        raise UnknownNameError(f"{pattern!r} has more parts than HOUSEHOLD/MODEL/SIZE/SYSTEM")
    given += ["*"] * (len(known) - len(given))
    return [_names(part, what, names) for part, (what, names) in zip(given, known, strict=True)]


def _names(part: str, what: str, known: Sequence[str]) -> set[str]:
    if part in ("*", ""):
        return set(known)
    chosen = set(part.split(","))
    for name in sorted(chosen - set(known)):
        raise UnknownNameError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return chosen


def _matches(cell: Cell, parts: Sequence[set[str]]) -> bool:
    names = (cell.household, cell.model, cell.size, cell.system)
    return all(name in part for name, part in zip(names, parts, strict=True))


WARM = 2
"""Enough for a household whose plan stays: p2ptrain's rounds overlap."""
_BY_ITSELF = ("torch", "single")


@dataclass(frozen=True, slots=True)
class Rounds:
    """`warm` rounds do not count, the `steady` ones after them do."""

    warm: int
    steady: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.warm + self.steady


def rounds_of(cell: Cell, steady: int, settle: int = WARM) -> Rounds:
    """One round warms up a single device, whose rounds are long and alike: half as many count.

    Args:
        steady: rounds that count.
        settle: rounds before those where p2ptrain may change its plan: it looks after ten.
    """
    if cell.system in _BY_ITSELF:
        return Rounds(1, max(2, steady // 2))
    return Rounds(WARM if cell.is_rival else settle, steady)
