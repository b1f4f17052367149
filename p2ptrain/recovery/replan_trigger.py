"""When a job that runs well looks for a better plan: a device joins, leaves or drifts. Pure.

    a device joins    after a quiet time ──► evaluate ──► it pays: change, between two rounds
    a device leaves   evaluate at once ──► change, unless the others cannot hold its work
                      (leave denied)
    a device drifts   evaluate ──► it pays: change

A new member may not be linked or measurable yet: an evaluation without it is repeated. A plan made
after a death, while everything waited, is one that can begin soon; the first drift evaluation looks
for the best one.

An evaluation plans while training continues. One runs at a time: a leave replaces any other, a
new device a drift evaluation; what was replaced is tried again. A result counts only while the plan
it was asked for is in force; once a change has been requested, only leaves are evaluated until the
next plan. Each method takes the time (seconds of any monotonic clock) and returns what to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings

LONGEST_SETTLE_SECONDS = 5.0
"""Even where one more comes every second."""

OVERTAKE_SECONDS = 20.0
"""So long who comes waits for the look at those who came before: a slow one may be measured."""

MAX_TRIES = 7
"""Looks at the same newcomers, two minutes in all; the next plan, or drift look, sees them too."""

MAX_MOVES = 32
"""Changes remembered: each doubles what the next has to gain, so that more make no difference."""

_NEVER = float("inf")


class ElasticInstruction:
    """What the holder is to do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EvaluateNow(ElasticInstruction):
    """Have it looked for; a look under way is given up.

    Attributes:
        without: devices that are leaving.
        moved_seconds_ago: ages of the changes so far that only speeds were the reason of.
    """

    number: int
    reason: ReconfigureReason
    without: frozenset[str]
    moved_seconds_ago: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AdoptPlan(ElasticInstruction):
    """Change at the border of a round, to what the newest look has found if it found something."""

    reason: ReconfigureReason
    leaver: str | None = None


@dataclass(frozen=True, slots=True)
class RefuseLeave(ElasticInstruction):
    """Deny the leave of a device, with the reason."""

    device: str
    reason: str


class ReplanTrigger:
    """See the module.

    Args:
        holder: own id.
        replans: whether the plan may change although no device joined or left.

    Attributes:
        in_haste: the plan in force was made to go on soon, and has not been looked at since.
    """

    def __init__(
        self, holder: str, *, replans: bool = True, settings: RecoverySettings = HOME
    ) -> None:
        self._settings = settings
        self.in_haste = False
        self._replans = replans
        self._alive = {holder}
        self._new: dict[str, float] = {}  # alive, not considered by any plan: since when
        self._due = _NEVER  # of a look at them
        self._tries = 0
        self._leaving: set[str] = set()  # devices of the plan
        self._drifted = False
        self._devices: frozenset[str] | None = None  # of the plan in force
        self._number = 0
        self._look: ReconfigureReason | None = None  # under way
        self._looked_at: frozenset[str] = frozenset()  # alive when that look began
        self._moves: deque[float] = deque(maxlen=MAX_MOVES)
        self._changes = False  # a change has been called for, and is to come
        self._now = float("-inf")
        self._out: list[ElasticInstruction] = []

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest."""
        return _NEVER if self._devices is None else self._join_due

    def tick(self, now: float) -> list[ElasticInstruction]:
        """Do what is due."""
        self._now = max(now, self._now)
        self._step()
        out, self._out = self._out, []
        return out

    def joined(self, device: str, now: float) -> list[ElasticInstruction]:
        """A device is alive."""
        self._now = max(now, self._now)
        if device not in self._alive:
            self._alive.add(device)
            self._new[device] = self._now
            longest = min(self._new.values()) + LONGEST_SETTLE_SECONDS
            settled = self._now + self._settings.newcomer_settle_seconds
            self._due = max(min(settled, longest), self._now)
            self._tries = 0
        return self.tick(now)

    def gone(self, device: str, now: float) -> list[ElasticInstruction]:
        """A device is not alive any more."""
        self._alive.discard(device)
        self._forget_new((device,))
        self._leaving.discard(device)
        return self.tick(now)

    def leaving(self, device: str, now: float) -> list[ElasticInstruction]:
        """A device wants to leave, and waits for our word."""
        self._forget_new((device,))
        if self._devices is None or device not in self._devices:
            self._out.append(AdoptPlan(ReconfigureReason.LEAVE, device))
        else:
            self._leaving.add(device)
            self._overtake()  # of less importance, or with it considered
        return self.tick(now)

    def compared(self, now: float) -> list[ElasticInstruction]:
        """Rounds were compared with what the plan expects: it may be time for another one."""
        has_choice = len(self._alive) > 1  # a device alone stays with its plan
        self._drifted = self._replans and has_choice
        return self.tick(now)

    def ended(self, now: float) -> list[ElasticInstruction]:
        """The plan in force ends, and with it what was looked at for it."""
        self._devices = self._look = None
        self._drifted = self._changes = False
        return self.tick(now)

    def began(
        self,
        devices: frozenset[str],
        now: float,
        considered: frozenset[str] = frozenset(),
        *,
        in_haste: bool = False,
    ) -> list[ElasticInstruction]:
        """A plan is in force on these devices.

        Args:
            considered: devices that it was chosen from; empty = it was not chosen again.
            in_haste: it is a new one that was made while training stood still.
        """
        self.ended(now)
        self._devices = devices
        self.in_haste = self.in_haste or in_haste
        self._forget_new(considered | devices)
        if self._due == _NEVER:  # given up, but much may be different now
            self._due, self._tries = self._now, 0
        self._let_go(self._leaving - devices)
        return self.tick(now)

    def answered(
        self, number: int, devices: frozenset[str], in_sight: frozenset[str], now: float
    ) -> list[ElasticInstruction]:
        """What look `number` has found.

        Args:
            devices: of the plan to change to; empty = the present one is best.
            in_sight: devices whose speeds and links were known.
        """
        self._now = max(now, self._now)
        reason = self._looked(number)
        if reason is ReconfigureReason.LEAVE:
            self._let_go(self._leaving)
        elif reason is not None:
            self._forget_new(in_sight)
            if reason is ReconfigureReason.JOIN and self._new.keys() & self._looked_at:
                self._try_again()
            self._move(devices)
            self.in_haste = False
        return self.tick(now)

    def failed(
        self, number: int, now: float, impossible: str | None = None
    ) -> list[ElasticInstruction]:
        """Look `number` failed; `impossible`: no plan fits what was asked about, and why."""
        self._now = max(now, self._now)
        reason = self._looked(number)
        if reason is ReconfigureReason.LEAVE and impossible is not None:
            self._keep(impossible)
        elif reason is ReconfigureReason.LEAVE:
            self._let_go(self._leaving)
        elif reason is ReconfigureReason.JOIN:
            self._try_again()
        return self.tick(now)

    # -- looks ---------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._devices is None:
            return
        if self._look is None and self._leaving:
            self._begin_look(ReconfigureReason.LEAVE)
        elif self._changes:
            return
        elif self._now >= self._join_due:
            self._overtake()
            self._begin_look(ReconfigureReason.JOIN)
        elif self._look is None and self._drifted:
            self._begin_look(ReconfigureReason.DRIFT)

    @property
    def _join_due(self) -> float:
        """When to look at those who came, if nothing happens before."""
        if self._changes:
            return _NEVER
        if self._look is None:
            return self._due if self._new else _NEVER
        unseen = [since for device, since in self._new.items() if device not in self._looked_at]
        if not unseen or self._look is ReconfigureReason.LEAVE:
            return _NEVER  # that one ends in seconds
        if self._look is ReconfigureReason.DRIFT:
            return self._due
        return max(self._due, min(unseen) + OVERTAKE_SECONDS)

    def _overtake(self) -> None:
        """The look under way is given up: tried again afterwards, if there is still cause."""
        self._drifted = self._drifted or self._look is ReconfigureReason.DRIFT
        self._look = None

    def _forget_new(self, devices: Collection[str]) -> None:
        for device in devices:
            self._new.pop(device, None)

    def _begin_look(self, reason: ReconfigureReason) -> None:
        self._number += 1
        is_drift = reason is ReconfigureReason.DRIFT
        self._look, self._looked_at = reason, frozenset(self._alive)
        self._drifted = self._drifted and not is_drift
        # who comes is not kept out because speeds flickered, or another device joined before; nor
        # is what had to be found in haste kept for that
        counts = is_drift and not self.in_haste
        ages = tuple(self._now - moved for moved in self._moves) if counts else ()
        self._out.append(EvaluateNow(self._number, reason, frozenset(self._leaving), ages))

    def _looked(self, number: int) -> ReconfigureReason | None:
        """Why that look was made, which is over; None: it was given up before."""
        if number != self._number:
            return None
        reason, self._look = self._look, None
        return reason

    def _try_again(self) -> None:
        """Evaluate the new devices once more: soon, where another has joined since."""
        self._tries += 1
        if self._new.keys() <= self._looked_at:
            wait = self._settings.evaluation_retry_seconds * 2 ** (self._tries - 1)
            self._due = self._now + wait if self._tries < MAX_TRIES else _NEVER
            self._new = dict.fromkeys(self._new, self._due)  # who comes next settles on its own

    def _let_go(self, devices: Collection[str]) -> None:
        """They go in any case, by a plan that was found now or is found then."""
        self._drifted = self._drifted and not devices  # the plan changes: no need to look at this
        for device in sorted(devices):
            self._leaving.discard(device)
            self._changes = self._changes or device in (self._devices or ())
            self._out.append(AdoptPlan(ReconfigureReason.LEAVE, device))

    def _keep(self, reason: str) -> None:
        """Nothing changes: their leaves are denied."""
        for device in sorted(self._leaving):
            self._out.append(RefuseLeave(device, reason))
        self._leaving.clear()

    def _move(self, devices: Collection[str]) -> None:
        assert self._devices is not None
        if not devices:
            return
        if set(devices) - self._devices:
            self._changes = True
            self._out.append(AdoptPlan(ReconfigureReason.JOIN))
        elif self._replans:
            self._changes = True
            if not self.in_haste:
                self._moves.append(self._now)
            self._out.append(AdoptPlan(ReconfigureReason.DRIFT))
