"""Whether a holder waits for its coordinator's answer, plans by itself, or passes it over. Pure.

    ask ──► a useful answer: taken
      │ ──► another answer, or no sign of work for a while: passed over, planned here
      │ ──► the link ended: planned here
      └──── late: planned here meanwhile, and the first plan counts; late again: passed over

So no other device can stop or end a job: it can only cost a moment. Times are seconds of any
monotonic clock; what is to be done its port does, and calls the method named with it.
"""

from __future__ import annotations

from typing import Protocol

from p2ptrain.recovery.recovery_settings import HOME, Patience

_NEVER = float("inf")


class PlannerPort(Protocol):
    """What a question has done."""

    def ask(self, device: str) -> None:
        """Ask `device`; `answered`, `useless` or `no_answer`."""

    def ask_for_sign(self, device: str) -> None:
        """Ask `device` whether it works on that; `sign`."""

    def plan_here(self) -> None:
        """Begin; `found_here`."""

    def pass_over(self, device: str, why: str) -> None:
        """It is not to be asked for a while; `why` is for the user, after its name."""


class PlannerCore:
    """What lasts from question to question; `asked` begins one.

    Args:
        device: own id: this device is waited for, whatever it does.
    """

    def __init__(self, device: str, patience: Patience = HOME.patience) -> None:
        self.device = device
        self.patience = patience
        self._late: tuple[str, int] = ("", 0)

    def asked(
        self, now: float, coordinator: str | None, port: PlannerPort, *, waits: bool = False
    ) -> AskedPlan:
        """A question to the coordinator, None where there is none.

        Args:
            port: what does the work.
            waits: nothing waits for the answer, so that a plan is searched here only where the
                coordinator does not.
        """
        return AskedPlan(self, now, coordinator, port, waits=waits)

    def late(self, device: str) -> str | None:
        """Its answer was not there in time; why it is passed over now, if it is."""
        last, count = self._late
        count = count + 1 if last == device else 1
        self._late = (device, count)
        if count < self.patience.most_late or device == self.device:
            return None
        self.in_time()
        return f"had no answer in time, {count} times in a row"

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
        self,
        core: PlannerCore,
        now: float,
        coordinator: str | None,
        port: PlannerPort,
        *,
        waits: bool,
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
        self._port = port

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest."""
        if self.is_over or not self.is_asked or self._is_own:
            return _NEVER
        return min(self._silent_at, self._sign_at, _NEVER if self._plans_here else self._here_at)

    def start(self) -> None:
        """Ask."""
        if self._coordinator is None:
            self._plan_here()
        else:
            self._port.ask(self._coordinator)

    def answered(self) -> None:
        """The coordinator's answer is what was asked for."""
        if self.is_asked:
            self.is_over = True
            self._ended()

    def useless(self, why: str) -> None:
        """It is something else; `why` is for the user, after the device's name."""
        if self.is_asked:
            self._pass_over(why)

    def no_answer(self) -> None:
        """There will be none, and it is not to blame: the link ended."""
        if self.is_asked:
            self._ended()
            self._plan_here()

    def sign(self, now: float, *, works: bool) -> None:
        """It works on the question, as it says; or not, or says nothing."""
        if works:
            self._silent_at = now + self._core.patience.silence_seconds

    def found_here(self) -> None:
        """The holder has a plan of its own, or knows that there is none; or waits no longer."""
        if self.is_over:
            return
        self.is_over = True
        if self.is_asked and self._coordinator is not None:
            self.is_asked, self.was_late = False, True
            why = self._core.late(self._coordinator)
            if why is not None:
                self._port.pass_over(self._coordinator, why)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.next_wakeup == _NEVER:
            return
        if now >= self._silent_at:
            self._pass_over(f"did not answer for {self._core.patience.silence_seconds:g} s")
        elif now >= self._here_at:
            self._plan_here()
        if self.is_asked and now >= self._sign_at and self._coordinator is not None:
            self._sign_at = now + self._core.patience.look_seconds
            self._port.ask_for_sign(self._coordinator)

    def _ended(self) -> None:
        self.is_asked = False
        self._core.in_time()

    def _pass_over(self, why: str) -> None:
        self._ended()
        if self._coordinator is not None and not self._is_own:
            self._port.pass_over(self._coordinator, why)
        self._plan_here()

    def _plan_here(self) -> None:
        if not self._plans_here:
            self._plans_here = True
            self._port.plan_here()
