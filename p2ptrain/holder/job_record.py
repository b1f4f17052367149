"""What the holder remembers of a job: its journal, its plan, its first weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any

from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.holder.snapshots.full_snapshots import FullSnapshots
from p2ptrain.holder.start.journal import FIRST_GENERATION, Journal, JournalEntry
from p2ptrain.messages.assign import PlanInForce
from p2ptrain.recovery.choose_version import FullSnapshot
from p2ptrain.recovery.cores import holder_instructions
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version


class JobRecord:
    """See the module.

    Attributes:
        journal: where what happens is put down.
        in_force: the plan that the job runs by, or an earlier process left; None before the first.
        whole: copies of all stages in this process's memory; None where none are made.
        since: when this process began, by `time.monotonic`.
        reported: what was reported before this process began.
    """

    def __init__(
        self,
        entry: JournalEntry,
        journal: Journal,
        *,
        held: Callable[[], Collection[Version]],
        writes: bool,
        since: float,
        settings: RecoverySettings = HOME,
    ) -> None:
        """Begin with a job that is new, or found in a journal.

        Args:
            held: the versions that this device has all of.
            writes: whether checkpoints are written.
        """
        self.journal = journal
        self._settings = settings
        self.in_force = entry.in_force
        self._held = held
        self._writes = writes
        self.whole: FullSnapshots | None = None
        self.since = since
        self.reported = entry.reported
        self._first = Version(entry.first_step, 0)
        # numbers that were reserved for a first plan which never came are used up too
        is_new = entry.in_force is None and entry.next_generation == FIRST_GENERATION
        self._noted = None if is_new else entry.noted

    @property
    def noted(self) -> holder_instructions.WriteJournal | None:
        """What the journal says; None = a new job."""
        return self._noted

    def write_down(
        self, noted: holder_instructions.WriteJournal, answer: ReconfigureReply | None
    ) -> Coroutine[Any, Any, None] | None:
        """Put down what the rules say; returns what must have ended before it is announced.

        Args:
            answer: the newest, which may be what they accept.
        """
        old, self._noted = self._noted, noted
        if old is not None and replace(old, stable=noted.stable) == noted:
            if noted.stable is not None:
                self.journal.stable(noted.stable)
            return None
        generation = 0 if noted.placed is None else noted.placed.generation
        if answer is not None and answer.assignment.key.generation == generation:
            self.in_force = PlanInForce(answer.assignment, answer.plan)
        return self.journal.begun(noted, self.in_force) if self.journal.writes else None

    def copies(self, device: str, round_seconds: float | None) -> tuple[FullSnapshot, ...]:
        """Whole copies on this device that training could go on from.

        Args:
            device: own id.
            round_seconds: as measured; None = there is nothing yet but the plan's word.
        """
        # A user who writes checkpoints wants to resume from them, however long it takes; and to
        # the beginning rather than to nothing, where none can be read.
        held = self._held()
        found = [FullSnapshot(v, device, StateKind.GLOBAL) for v in held if v != self._first]
        if self._first in held:
            most = None if self._writes else self._most_replayed(round_seconds)
            found.append(FullSnapshot(self._first, device, StateKind.INITIAL, most))
        return tuple(found)

    def begin(self) -> None:
        """A generation begins."""
        if self.whole is not None:
            self.whole.begin()

    def pause(self) -> None:
        """The generation is over: what is held may be resumed from, and stays."""
        if self.whole is not None:
            self.whole.pause()

    def stable(self, version: Version) -> None:
        """Every stage has copies of a version."""
        if self.whole is not None:
            self.whole.stable(version)

    def _most_replayed(self, round_seconds: float | None) -> int | None:
        if round_seconds is None and self.in_force is not None:
            round_seconds = self.in_force.plan.predicted.round_seconds
        limit = self._settings.first_weights_replay_seconds
        return None if not round_seconds else max(1, int(limit / round_seconds))
