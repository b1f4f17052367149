"""For which devices this one measures, searches and stands ready.

Measuring a model, its links, searching a plan and standing ready for a job take a device's time.
They are done for the holder of the job, which alone commands; for one requester only for a
limited time; and, with `join --only-for`, only for jobs of the named devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import monotonic

from p2ptrain.errors import NotInCharge, PeerError
from p2ptrain.mesh.interface import Mesh, display_name

MEASURED_SECONDS = 450.0
"""Most that is measured for one device within STRETCH_SECONDS: without training it afterwards."""

STRETCH_SECONDS = 900.0

BOOKED_SECONDS = 180.0
"""So long a job that has not begun keeps its devices from others after the last word of it."""

MAX_BOOKED_SECONDS = 1800.0
"""The same in all: slow links may take as long for the first weights."""


class AskedTime:
    """How long this device has worked for the questions of each other one. Pure.

    Args:
        most_seconds: for one asker in any `stretch_seconds`.
    """

    def __init__(self, most_seconds: float, stretch_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._stretch_seconds = stretch_seconds
        self._spent: dict[str, deque[tuple[float, float]]] = {}  # by asker: (end, seconds)

    def spend(self, asker: str, begin: float, end: float) -> None:
        """This device has worked for it from `begin` to `end`."""
        spent = self._spent.setdefault(asker, deque())
        seconds = end - begin
        if spent and begin - spent[-1][0] < self._stretch_seconds / 100:  # so they stay few
            seconds += spent.pop()[1]
        spent.append((end, seconds))

    def wait_seconds(self, asker: str, now: float) -> float:
        """How long until it may ask again; 0: it may now."""
        spent = self._spent.get(asker, deque())
        while spent and spent[0][0] + self._stretch_seconds <= now:
            spent.popleft()
        if not spent:
            self._spent.pop(asker, None)
        over = sum(seconds for _, seconds in spent) - self._most_seconds
        if over < 0:
            return 0.0
        for end, seconds in spent:
            over -= seconds
            if over < 0:
                return end + self._stretch_seconds - now
        return self._stretch_seconds


class Booking:
    """A device that was asked to stand ready, and for how long nothing may come of it. Pure."""

    def __init__(
        self,
        now: float,
        quiet_seconds: float = BOOKED_SECONDS,
        most_seconds: float = MAX_BOOKED_SECONDS,
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._since = self._asked_at = now
        self._most_seconds = most_seconds
        self._has_begun = False

    def asked(self, now: float) -> None:
        """Something more was asked for, or was made ready."""
        self._asked_at = now

    def begun(self) -> None:
        """The job trains here: it is no booking any more."""
        self._has_begun = True

    def has_expired(self, now: float, *, is_preparing: bool) -> bool:
        """Whether the device may work for another job."""
        if self._has_begun:
            return False
        is_quiet = not is_preparing and now - self._asked_at >= self._quiet_seconds
        return is_quiet or now - self._since >= self._most_seconds


class Due:
    """Says whose questions count here.

    Args:
        only_for: names of the devices for whose jobs alone this one computes; empty: for all. A
            name means the device that bears it when it first asks.
        holder: id of the device whose job this one works for, if there is one.

    Attributes:
        rests: why this device works for no other one now, in a sentence; "" where it does.
    """

    def __init__(
        self,
        mesh: Mesh,
        only_for: Collection[str] = (),
        holder: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._mesh = mesh
        self._only_for = tuple(only_for)
        self._meant: dict[str, str] = {}  # ids, by name
        self._holder = holder
        self._asked = AskedTime(MEASURED_SECONDS, STRETCH_SECONDS)
        self._works = 0
        self.rests = ""

    @property
    def is_working(self) -> bool:
        """Whether this device measures or plans something for another one now."""
        return self._works > 0

    def check_job_of(self, holder: str) -> None:
        """Raises PeerError: this device's person does not lend it to that one's jobs, or rests."""
        if holder == self._mesh.self_id:
            return
        if self.rests:
            raise PeerError(self.rests)
        if not self._only_for:
            return
        name = display_name(self._mesh, holder)
        if name in self._only_for and self._meant.setdefault(name, holder) == holder:
            return
        names = " and ".join(self._only_for)
        raise PeerError(f"{self._mesh.name} computes only for trainings of {names} (--only-for)")

    def check_in_charge(self, peer: str) -> None:
        """Raises NotInCharge: it does not hold the data of the job here."""
        if peer != self._holder():
            raise NotInCharge(f"{display_name(self._mesh, peer)} holds the data of no job here")

    def check_plans_for(self, peer: str) -> None:
        """Raises NotInCharge: this device neither coordinates nor works for a job of `peer`, or it
        rests."""
        if self.rests:
            raise NotInCharge(f"{self._mesh.name}: {self.rests}")
        office = self._mesh.coordinator
        if office is None or office.id != self._mesh.self_id:
            self.check_in_charge(peer)

    @contextmanager
    def measuring(self, peer: str) -> Iterator[None]:
        """Around what is measured for it. Raises PeerError: it has had its time."""
        wait_seconds = self._asked.wait_seconds(peer, monotonic())
        if wait_seconds > 0:
            raise PeerError(
                f"{self._mesh.name} has measured for {display_name(self._mesh, peer)} for long "
                "enough, "
                f"and does so again in {wait_seconds:.0f} s"
            )
        begin = monotonic()
        try:
            with self.working():
                yield
        finally:
            self._asked.spend(peer, begin, monotonic())

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what is done for others: they see that it is under way."""
        self._works += 1
        try:
            yield
        finally:
            self._works -= 1
