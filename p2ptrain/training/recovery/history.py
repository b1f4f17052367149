"""What is true of a job: how it came about, which plan is in force, which numbers were used. Pure.

The holder alone owns it. It is written down before anybody hears of it.
"""

from __future__ import annotations

from p2ptrain.training.recovery.change import EPOCHS_A_REQUEST
from p2ptrain.training.recovery.choose import GlobalCopy, Past
from p2ptrain.training.recovery.holder_instructions import Journal
from p2ptrain.training.recovery.lineage import Lineage
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.recovery.presence import Presence
from p2ptrain.training.recovery.version import Version


class History:
    """See the module.

    Args:
        journal: what an earlier process of this job wrote last; None = a new job.
        reported: updates that people were told of, or that the job begins with.

    Attributes:
        lineage: of the job.
        next_epoch: first epoch number that was never used.
        placed: the plan in force, None before the first.
        stable: newest version of which every copy was acknowledged.
        reported: as above.
        copies: the whole copies that training could go on from.
    """

    def __init__(self, journal: Journal | None, reported: int) -> None:
        self.lineage = journal.lineage if journal else Lineage()
        self.next_epoch = journal.next_epoch if journal else 1
        self.placed: Placed | None = journal.placed if journal else None
        self.stable: Version | None = journal.stable if journal else None
        self.reported = reported
        self.copies: tuple[GlobalCopy, ...] = ()
        self._has_begun = False  # in this process, which so knows what it has said to count

    @property
    def parts(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By device, the units that it trains or keeps copies of; none before the first plan."""
        return {} if self.placed is None else self.placed.places()

    @property
    def is_safe(self) -> bool:
        """Whether what the epoch in force began with is safe whoever goes."""
        placed = self.placed
        if placed is None:
            return False
        return not placed.keeps or (
            self.stable is not None and self.stable.step >= placed.version.step
        )

    def past(self, there: Presence, *, clips: bool, asynchronous: bool = False) -> Past:
        """What counts beside the inventories."""
        return Past(
            self.lineage,
            self.reported,
            self.copies,
            self.parts,
            frozenset(there.silent),
            frozenset(there.took_part),
            clips,
            asynchronous,
            self.reported + 1 if self._has_begun and not asynchronous else None,
        )

    def reserve(self) -> int:
        """Epoch numbers for one request; returns the first, which is the request's own too.

        They rise, also over the holder's restarts.
        """
        number = self.next_epoch
        self.next_epoch += EPOCHS_A_REQUEST
        return number

    def accept(self, placed: Placed) -> None:
        """An epoch is in force."""
        back_to = self.stable.step if self.stable is not None else 0
        oldest = min([placed.version.step, back_to, *(c.version.step for c in self.copies)])
        self.lineage = self.lineage.begun(placed.epoch, placed.version).pruned(oldest)
        if self.stable is not None and not self.lineage.is_valid(self.stable):
            self.stable = None  # training goes on from before it
        # who made those updates was told to, and people before them (`OnceOnly.goes_on_from`)
        self.reported = max(self.reported, placed.version.step)
        self.next_epoch = placed.epoch + 1
        self.placed = placed
        self._has_begun = True

    def written_down(self, took_part: tuple[tuple[str, int], ...]) -> Journal:
        """For the disk."""
        return Journal(self.next_epoch, self.lineage, self.placed, self.stable, took_part)
