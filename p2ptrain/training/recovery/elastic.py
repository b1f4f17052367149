"""When a job that nothing is wrong with looks for a better plan: somebody came, leaves, or drifts.

    a device appears    SETTLE_SECONDS without another ──► look ──► it pays: change, at a border
    a device leaves     look at once, whatever else is looked at ──► change in any case
    a drift look        look ──► it pays: change

To look is to ask the coordinator, while training goes on, for what it would do now. One look at a
time; what it finds counts only while the plan it was asked for is in force. Pure: feed events and
ticks with the time (seconds of any monotonic clock), carry out what it returns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.errors import InternalError
from p2ptrain.training.recovery.change import Reason

SETTLE_SECONDS = 1.0
"""Devices are switched on together: one look for all of them."""
RETRY_SECONDS = 5.0
"""After a look at newcomers that failed."""
MOST_TRIES = 3
"""Looks at the same newcomers; the next drift look sees them too."""
_NEVER = float("inf")


# -- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Appeared:
    """A device is alive."""

    device: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A device is not alive any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """A device wants to leave, and waits for our word."""

    device: str


@dataclass(frozen=True, slots=True)
class Drifted:
    """Rounds were compared with what the plan expects: it may be time for another one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The plan in force ends; for the next one these devices are considered."""

    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class Began:
    """A plan is in force on these devices."""

    devices: frozenset[str]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a look has found.

    Attributes:
        devices: of the plan to change to; empty = the present one is best.
    """

    number: int
    devices: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A look failed."""

    number: int


ElasticEvent: TypeAlias = (
    Appeared | Gone | Leaving | Drifted | Asked | Began | Answered | Unanswered
)


# -- instructions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookNow:
    """Ask the coordinator; a look under way is given up.

    Attributes:
        without: devices that are leaving.
        moved_seconds_ago: ages of the changes so far that nothing forced.
    """

    number: int
    reason: Reason
    without: frozenset[str]
    moved_seconds_ago: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """Change at the border of a round, to what the newest look has found if it found something."""

    reason: Reason
    leaver: str | None = None


ElasticInstruction: TypeAlias = LookNow | ChangePlan


class ElasticCore:
    """See the module.

    Args:
        holder: own id.
        replans: whether the plan may change although nobody came or left.
    """

    def __init__(self, holder: str, *, replans: bool = True) -> None:
        self._replans = replans
        self._alive = {holder}
        self._new: set[str] = set()  # alive, and no plan was made with it in sight
        self._due = _NEVER  # of a look at them
        self._tries = 0
        self._leaving: set[str] = set()  # devices of the plan
        self._drifted = False
        self._devices: frozenset[str] | None = None  # of the plan in force
        self._asked: frozenset[str] = frozenset()
        self._number = 0
        self._look: Reason | None = None  # under way
        self._moves: list[float] = []
        self._now = float("-inf")
        self._out: list[ElasticInstruction] = []

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest."""
        waits = bool(self._new) and self._devices is not None and self._look is None
        return self._due if waits else _NEVER

    def tick(self, now: float) -> list[ElasticInstruction]:
        """Do what is due."""
        self._now = max(now, self._now)
        self._step()
        return self._finish()

    def handle(self, event: ElasticEvent, now: float) -> list[ElasticInstruction]:
        """Take in one event."""
        self._now = max(now, self._now)
        match event:
            case Appeared() | Gone() | Leaving():
                self._on_device(event)
            case Drifted():
                has_choice = len(self._alive) > 1  # a device alone stays with its plan
                self._drifted = self._replans and has_choice and self._look is None
            case Asked(alive):
                self._asked = alive
                self._end()
            case Began(devices):
                self._end()
                self._devices = devices
                self._new -= self._asked | devices
                self._let_go(self._leaving - devices)
            case Answered() | Unanswered():
                if event.number == self._number and self._look is not None:
                    self._on_answer(event)
            case _:
                raise InternalError(f"no rule for {type(event).__name__}")
        self._step()
        return self._finish()

    def _finish(self) -> list[ElasticInstruction]:
        out, self._out = self._out, []
        return out

    def _end(self) -> None:
        """The plan in force ends, and with it what was looked at for it."""
        self._devices = self._look = None
        self._drifted = False

    # -- devices -------------------------------------------------------------------------------

    def _on_device(self, event: Appeared | Gone | Leaving) -> None:
        device = event.device
        match event:
            case Appeared():
                if device not in self._alive:
                    self._alive.add(device)
                    self._new.add(device)
                    self._due, self._tries = self._now + SETTLE_SECONDS, 0
            case Gone():
                self._alive.discard(device)
                self._new.discard(device)
                self._leaving.discard(device)
            case Leaving():
                self._new.discard(device)
                if self._devices is None or device not in self._devices:
                    self._out.append(ChangePlan(Reason.LEAVE, device))
                else:
                    self._leaving.add(device)
                    self._look = None  # of less importance, or with it in sight

    # -- looks ---------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._devices is None or self._look is not None:
            return
        if self._leaving:
            self._begin_look(Reason.LEAVE)
        elif self._new and self._now >= self._due:
            self._begin_look(Reason.JOIN)
        elif self._drifted:
            self._begin_look(Reason.DRIFT)

    def _begin_look(self, reason: Reason) -> None:
        self._number += 1
        self._look, self._drifted = reason, False
        ages = tuple(self._now - moved for moved in self._moves)
        self._out.append(LookNow(self._number, reason, frozenset(self._leaving), ages))

    def _on_answer(self, event: Answered | Unanswered) -> None:
        reason, self._look = self._look, None
        if reason is Reason.LEAVE:
            self._let_go(self._leaving)
        elif isinstance(event, Unanswered):
            if reason is Reason.JOIN:
                self._tries += 1
                self._due = self._now + RETRY_SECONDS if self._tries < MOST_TRIES else _NEVER
        else:
            self._due = _NEVER
            self._new.clear()
            self._move(event.devices)

    def _let_go(self, devices: Collection[str]) -> None:
        """They go in any case, by a plan that was found now or is found then."""
        for device in sorted(devices):
            self._leaving.discard(device)
            self._out.append(ChangePlan(Reason.LEAVE, device))

    def _move(self, devices: Collection[str]) -> None:
        assert self._devices is not None
        if not devices:
            return
        joins = bool(set(devices) - self._devices)
        if joins or self._replans:
            self._moves.append(self._now)
            self._out.append(ChangePlan(Reason.JOIN if joins else Reason.DRIFT))
