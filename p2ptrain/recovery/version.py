"""Which state of the weights: the number of updates and the generation that computed them; lineage.

Every generation that began is an era. It starts from an earlier one at some step; what that one
computed beyond belongs to another history from then on, and may not be mixed with this one:

    generation 1   0 ────────────► 100
    generation 2   └──────► 50 ───────► 120      began with version 50 of generation 1
    generation 3                   └──► 110      began with version 100 of generation 2

Valid: generation 1 up to 50, generation 2 up to 100, generation 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, TypeAlias

from p2ptrain.errors import ProtocolError
from p2ptrain.net.forms import By, Count, Length, Row


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The state of parameters, optimizer and buffers after `step` updates.

    One version has one content on every device: within a generation each step is computed once. Two
    generations that computed the same step may differ in bits, where groups sum in another order.

    Attributes:
        step: updates applied.
        computed: the generation that computed it; 0 = the weights that the job began with.
    """

    step: Count
    computed: Count

    @property
    def age(self) -> tuple[int, int]:
        """What is computed later is greater, also after a step back."""
        return self.computed, self.step


VersionRow: TypeAlias = Annotated[Version, Row()]
"""As it travels within another form."""

ERAS_LIMIT = 64
"""Most eras kept: each is one change of generation; older ones end before any copy that still
exists."""


@dataclass(frozen=True, slots=True)
class Era:
    """One generation that began.

    Attributes:
        generation: its number.
        start: updates applied to the state that it began with.
        origin: the generation that computed that state; 0 = the first weights.
    """

    generation: Count
    start: Count
    origin: Count


Eras: TypeAlias = Annotated[tuple[Annotated[Era, Row()], ...], Length(ERAS_LIMIT)]


@dataclass(frozen=True, slots=True)
class Lineage:
    """The eras of a job, oldest first. The holder owns it; others see copies.

    Raises:
        ProtocolError: an era does not come after the one before it.
    """

    eras: Eras = ()

    def __post_init__(self) -> None:
        for before, era in pairwise(self.eras):
            if era.generation <= before.generation:
                raise ProtocolError(
                    f"generation {era.generation} cannot begin after generation {before.generation}"
                )

    def begun(self, generation: int, start: Version) -> Lineage:
        """With one more era.

        Raises:
            ProtocolError: `generation` is not above all others.
        """
        return Lineage((*self.eras, Era(generation, start.step, start.computed)))

    def is_valid(self, version: Version) -> bool:
        """Whether `version` belongs to the history that the last era continues."""
        return any(_holds(era, most, version) for era, most in self._limited())

    def pruned(self, oldest: int) -> Lineage:
        """Without the eras that were left before version `oldest`; at most ERAS_LIMIT stay."""
        kept = [era for era, most in self._limited() if most is None or most >= oldest]
        return Lineage(tuple(kept[-ERAS_LIMIT:]))

    def _limited(self) -> Iterator[tuple[Era, int | None]]:
        """Each era with the last step that counts of it: the least start of all later eras."""
        most: int | None = None
        limited: list[tuple[Era, int | None]] = []
        for era in reversed(self.eras):
            limited.append((era, most))
            most = era.start if most is None else min(most, era.start)
        return reversed(limited)


LineageRows: TypeAlias = Annotated[Lineage, By(Lineage, attrgetter("eras"), Eras)]
"""As files have it."""


def _holds(era: Era, most: int | None, version: Version) -> bool:
    if most is not None and version.step > most:
        return False
    if version.computed == era.generation:
        return version.step > era.start
    return version == Version(era.start, era.origin)
