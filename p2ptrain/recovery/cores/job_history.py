"""The history of a job, the plan in force, the numbers used, and what was reported. Pure.

The holder alone owns it. It is written to the journal before anything of it is announced. Each step
and each evaluation is reported once, whatever is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.errors import InternalError
from p2ptrain.recovery.choose_version import FullSnapshot, KnownPast
from p2ptrain.recovery.cores.liveness import DeviceLiveness
from p2ptrain.recovery.generation_request import GENERATIONS_PER_REQUEST
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.version import Lineage, Version


@dataclass(frozen=True, slots=True)
class NotedHistory:
    """What the journal says of it.

    Attributes:
        next_generation: first number that was never used.
        placed: the plan in force, None before the first.
        stable: newest version of which every copy was acknowledged.
        took_part: devices that had a part in a generation of the lineage, each with its last one.
    """

    next_generation: int
    lineage: Lineage
    placed: Placement | None
    stable: Version | None = None
    took_part: tuple[tuple[str, int], ...] = ()


class JobHistory:
    """See the module.

    Args:
        journal: what an earlier process of this job wrote last; None = a new job.
        reported: updates that were reported, or that the job begins with.
        copies: the whole copies that training could go on from now.

    Attributes:
        lineage: of the job.
        next_generation: first generation number that was never used.
        placed: the plan in force, None before the first.
        stable: newest version of which every copy was acknowledged.
        reported: as above.
    """

    def __init__(
        self,
        journal: NotedHistory | None,
        reported: int,
        copies: Callable[[], tuple[FullSnapshot, ...]] = tuple,
    ) -> None:
        self.lineage = journal.lineage if journal else Lineage()
        self.next_generation = journal.next_generation if journal else 1
        self.placed: Placement | None = journal.placed if journal else None
        self.stable: Version | None = journal.stable if journal else None
        self.reported = reported
        self._copies = copies
        self._has_begun = False  # in this process, which so knows what it has said to count

    @property
    def parts(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By device, the units that it trains or keeps copies of; none before the first plan."""
        return {} if self.placed is None else self.placed.places()

    @property
    def is_safe(self) -> bool:
        """Whether what the generation in force began with is safe whichever device goes."""
        placed = self.placed
        if placed is None:
            return False
        return not placed.keeps or (
            self.stable is not None and self.stable.step >= placed.version.step
        )

    def past(self, there: DeviceLiveness, *, clips: bool, asynchronous: bool = False) -> KnownPast:
        """What counts beside the state reports."""
        return KnownPast(
            self.lineage,
            self.reported,
            self._copies(),
            self.parts,
            frozenset(there.silent),
            frozenset(there.took_part),
            clips,
            asynchronous,
            self.reported + 1 if self._has_begun and not asynchronous else None,
        )

    def reserve(self) -> int:
        """Generation numbers for one request; returns the first, which is the request's own too.

        They rise, also over the holder's restarts.
        """
        number = self.next_generation
        self.next_generation += GENERATIONS_PER_REQUEST
        return number

    def accept(self, placed: Placement) -> None:
        """A generation is in force."""
        back_to = self.stable.step if self.stable is not None else 0
        oldest = min([placed.version.step, back_to, *(c.version.step for c in self._copies())])
        self.lineage = self.lineage.begun(placed.generation, placed.version).pruned(oldest)
        if self.stable is not None and not self.lineage.is_valid(self.stable):
            self.stable = None  # training resumes from before it
        # those updates were committed, and reported before them (`ReportOnce.goes_on_from`)
        self.reported = max(self.reported, placed.version.step)
        self.next_generation = placed.generation + 1
        self.placed = placed
        self._has_begun = True

    def written_down(self, took_part: tuple[tuple[str, int], ...]) -> NotedHistory:
        """For the disk."""
        return NotedHistory(self.next_generation, self.lineage, self.placed, self.stable, took_part)


@dataclass(frozen=True, slots=True)
class ReportedProgress:
    """What was reported.

    Attributes:
        step: the highest step reported; -1 = none, not even the first weights.
        evaluated: the highest step whose evaluation was reported; -1 = none.
    """

    step: int
    evaluated: int = -1


class ReportOnce:
    """Says of each result whether it is news.

    Args:
        reported: what was reported so far; `step` is at first what the job began with.
    """

    def __init__(self, reported: ReportedProgress) -> None:
        self._reported = reported

    @property
    def reported(self) -> ReportedProgress:
        """What was reported so far."""
        return self._reported

    def step(self, step: int) -> bool:
        """Whether to report that `step` updates are done; the same number never again.

        Raises:
            InternalError: the step before was never reported.
        """
        if step > self._reported.step + 1:
            raise InternalError(f"step {step} is done, but {self._reported.step} was the last one")
        if step <= self._reported.step:
            return False
        self._reported = ReportedProgress(step, self._reported.evaluated)
        return True

    def goes_on_from(self, step: int) -> int:
        """Training resumes with `step` updates done; returns how many were unknown here.

        An update is made where it was reported, and a power cut may lose the record of that:
        what was written down last reaches the disk within a second.
        """
        unknown = max(step - self._reported.step, 0)
        self._reported = ReportedProgress(self._reported.step + unknown, self._reported.evaluated)
        return unknown

    def eval(self, step: int) -> bool:
        """Whether to report the evaluation after `step` updates."""
        if step <= self._reported.evaluated:
            return False
        self._reported = ReportedProgress(self._reported.step, step)
        return True
