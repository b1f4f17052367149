"""Whether a holder waits for its coordinator's answer, plans by itself, or passes it over. Pure.

    ask ──► a useful answer: taken
      │ ──► another answer, or no sign of work for a while: passed over, planned here
      │ ──► the link ended: planned here
      └──── late: planned here meanwhile, and the first plan counts; late again: passed over

So no other device can stop or end a job: it can only cost a moment. Feed events and ticks with the
time (seconds of any monotonic clock), carry out what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.recovery.recovery_settings import HOME, Patience

_NEVER = float("inf")


class PlannerEvent:
    """What becomes of a question."""

    __slots__ = ()


class PlannerInstruction:
    """What is to be done for it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PlanAnswered(PlannerEvent):
    """The coordinator's answer is what was asked for."""


@dataclass(frozen=True, slots=True)
class Useless(PlannerEvent):
    """It is something else; `why` is for the user, after the device's name."""

    why: str


@dataclass(frozen=True, slots=True)
class NoAnswer(PlannerEvent):
    """There will be none, and it is not to blame: the link ended."""


@dataclass(frozen=True, slots=True)
class Sign(PlannerEvent):
    """It works on the question, as it says; or not, or says nothing."""

    works: bool


@dataclass(frozen=True, slots=True)
class FoundHere(PlannerEvent):
    """The holder has a plan of its own, or knows that there is none."""


@dataclass(frozen=True, slots=True)
class AskPlanner(PlannerInstruction):
    """Ask `device`; say `PlanAnswered`, `Useless` or `NoAnswer`."""

    device: str


@dataclass(frozen=True, slots=True)
class AskForSign(PlannerInstruction):
    """Ask `device` whether it works on that; say `Sign`."""

    device: str


@dataclass(frozen=True, slots=True)
class PlanHere(PlannerInstruction):
    """Begin; say `FoundHere`."""


@dataclass(frozen=True, slots=True)
class PassOver(PlannerInstruction):
    """`device` is not to be asked for a while."""

    device: str
    why: str


class PlannerCore:
    """What lasts from question to question; `asked` begins one.

    Args:
        device: own id: this device is waited for, whatever it does.
    """

    def __init__(self, device: str, patience: Patience = HOME.patience) -> None:
        self.device = device
        self.patience = patience
        self._late: tuple[str, int] = ("", 0)

    def asked(self, now: float, coordinator: str | None, *, waits: bool = False) -> AskedPlan:
        """A question to the coordinator, None where there is none.

        Args:
            waits: nothing waits for the answer, so that a plan is searched here only where the
                coordinator does not.
        """
        return AskedPlan(self, now, coordinator, waits=waits)

    def late(self, device: str) -> PassOver | None:
        """Its answer was not there in time."""
        last, count = self._late
        count = count + 1 if last == device else 1
        self._late = (device, count)
        if count < self.patience.most_late or device == self.device:
            return None
        self.in_time()
        return PassOver(device, f"had no answer in time, {count} times in a row")

    def in_time(self) -> None:
        """There was one, of whatever kind."""
        self._late = ("", 0)


class AskedPlan:
    """One question.

    Attributes:
        is_asked: the coordinator's answer may come yet.
        is_over: there is an answer, from there or from here.
        was_late: it is from here, and the coordinator still worked.
    """

    def __init__(
        self, core: PlannerCore, now: float, coordinator: str | None, *, waits: bool
    ) -> None:
        self.is_asked = coordinator is not None
        self.is_over = self.was_late = False
        self._core = core
        self._coordinator = coordinator
        self._is_own = coordinator == core.device
        self._plans_here = False
        self._silent_at = now + core.patience.silence_seconds
        self._sign_at = now + core.patience.look_seconds
        self._here_at = _NEVER if waits else now + core.patience.head_start_seconds
        self._out: list[PlannerInstruction] = []

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest."""
        if self.is_over or not self.is_asked or self._is_own:
            return _NEVER
        return min(self._silent_at, self._sign_at, _NEVER if self._plans_here else self._here_at)

    def start(self) -> list[PlannerInstruction]:
        """Ask."""
        if self._coordinator is None:
            self._plan_here()
        else:
            self._out.append(AskPlanner(self._coordinator))
        return self._finish()

    def handle(self, event: PlannerEvent, now: float) -> list[PlannerInstruction]:
        """Take in one event."""
        if self.is_over:
            return []
        match event:
            case Sign(works):
                if works:
                    self._silent_at = now + self._core.patience.silence_seconds
            case FoundHere():
                self._out += self.give_up()
            case PlanAnswered() if self.is_asked:
                self.is_over = True
                self._ended()
            case Useless(why) if self.is_asked:
                self._pass_over(why)
            case NoAnswer() if self.is_asked:
                self._ended()
                self._plan_here()
        return self._finish()

    def tick(self, now: float) -> list[PlannerInstruction]:
        """Do what is due."""
        if self.next_wakeup == _NEVER:
            return []
        if now >= self._silent_at:
            self._pass_over(f"did not answer for {self._core.patience.silence_seconds:g} s")
        elif now >= self._here_at:
            self._plan_here()
        if self.is_asked and now >= self._sign_at and self._coordinator is not None:
            self._sign_at = now + self._core.patience.look_seconds
            self._out.append(AskForSign(self._coordinator))
        return self._finish()

    def give_up(self) -> list[PassOver]:
        """The coordinator's answer would be of no use any more."""
        self.is_over = True
        if not self.is_asked or self._coordinator is None:
            return []
        self.is_asked, self.was_late = False, True
        late = self._core.late(self._coordinator)
        return [] if late is None else [late]

    def _finish(self) -> list[PlannerInstruction]:
        out, self._out = self._out, []
        return out

    def _ended(self) -> None:
        self.is_asked = False
        self._core.in_time()

    def _pass_over(self, why: str) -> None:
        self._ended()
        if self._coordinator is not None and not self._is_own:
            self._out.append(PassOver(self._coordinator, why))
        self._plan_here()

    def _plan_here(self) -> None:
        if not self._plans_here:
            self._plans_here = True
            self._out.append(PlanHere())
