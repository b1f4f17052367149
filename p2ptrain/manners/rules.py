"""What a device does for its person: from readings and the time of day to a decision. Pure.

    quiet hours, battery, person, heat, memory ──► causes that hold ──► the strictest decides

Sensors flicker, and each change of mind costs the whole household a plan. So a cause begins once it
has held for a moment and ends once it has been away for longer; each time it comes back soon it
must stay away for twice as long. Quiet hours are exact: the clock does not flicker.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.manners.condition import Work
from p2ptrain.manners.readings import DeviceReading
from p2ptrain.manners.settings import Manners, OnBattery


@dataclass(frozen=True, slots=True)
class LatchTimes:
    """For how long a cause must hold, and be away again.

    Attributes:
        soon_seconds: a cause that comes back within that after it ended flickers.
        most_doublings: of the time that it must be away.
    """

    begin_seconds: float
    end_seconds: float
    soon_seconds: float = 120.0
    most_doublings: int = 5


@dataclass(frozen=True, slots=True)
class MannersLimits:
    """Attributes:
    slow_share: part of the time in which a slow device computes.
    used_seconds: a device whose person was there within them is in use.
    busy_cpu, free_cpu: load of others from which on a device is in use, and up to which it is
        idle, where its person cannot be seen otherwise.
    hotter_degrees: so much above the limit slowing down is not enough; so much below it the
        device is cool again.
    hot_seconds: slowing down has so long to help.
    memory_share: of the memory that was there at the start: what must be left for others,
        at most `memory_bytes`.
    """

    slow_share: float = 0.5
    used_share: float = 0.25
    used_seconds: float = 5.0
    busy_cpu: float = 0.25
    free_cpu: float = 0.1
    hotter_degrees: float = 5.0
    hot_seconds: float = 60.0
    memory_share: float = 0.05
    memory_bytes: int = 256 << 20
    person: LatchTimes = LatchTimes(0.0, 120.0, most_doublings=2)
    load: LatchTimes = LatchTimes(5.0, 120.0)
    battery: LatchTimes = LatchTimes(1.0, 3.0)
    heat: LatchTimes = LatchTimes(2.0, 30.0)
    memory: LatchTimes = LatchTimes(2.0, 60.0)


USUAL_LIMITS = MannersLimits()


@dataclass(frozen=True, slots=True)
class Decision:
    """What the device does now.

    Attributes:
        share: part of the time in which it may compute; also while it hands its work over.
        cause: why, such as "on battery"; "" where it works fully.
        until: such as "7:00", where that is known.
    """

    work: Work = Work.FULL
    share: float = 1.0
    cause: str = ""
    until: str = ""

    @property
    def sentence(self) -> str:
        """For people."""
        if self.work is Work.FULL:
            return ""
        if self.work is Work.SLOW:
            return f"slow: {self.cause}"
        return (
            f"left out until {self.until}: {self.cause}" if self.until else f"paused: {self.cause}"
        )


class Latch:
    """Whether a cause holds, without flicker."""

    def __init__(self, patience: LatchTimes) -> None:
        self._patience = patience
        self._holds = False
        self._other_since: float | None = None  # the signs say otherwise
        self._began = self._ended = float("-inf")
        self._doublings = 0

    def update(self, sign: bool | None, now: float) -> bool:
        """Take in a sign; None: nothing is known, and all stays as it is."""
        if sign is None or sign is self._holds:
            self._other_since = None
            return self._holds
        if self._other_since is None:
            self._other_since = now
        patience = self._patience
        wait = patience.end_seconds * 2**self._doublings if self._holds else patience.begin_seconds
        if now - self._other_since >= wait:
            self._turn(now)
        return self._holds

    def held_for(self, now: float) -> float:
        """How long it has held; 0 where it does not."""
        return now - self._began if self._holds else 0.0

    def _turn(self, now: float) -> None:
        self._holds = not self._holds
        self._other_since = None
        if not self._holds:
            self._ended = now
            return
        self._began = now
        flickers = now - self._ended <= self._patience.soon_seconds
        self._doublings = min(self._doublings + 1, self._patience.most_doublings) if flickers else 0


class MannersRules:
    """One a device; `decide` at every reading.

    Args:
        busy_share: part of the processor that p2ptrain takes while it computes: its threads by the
            cores.
    """

    def __init__(
        self, manners: Manners, limits: MannersLimits = USUAL_LIMITS, busy_share: float = 1.0
    ) -> None:
        self._manners = manners
        self._limits = limits
        self._cap = min(manners.max_cpu / busy_share, 1.0)
        self._person = Latch(limits.person)
        self._load = Latch(limits.load)
        self._battery = Latch(limits.battery)
        self._warm = Latch(limits.heat)
        self._hot = Latch(limits.heat)
        self._memory = Latch(limits.memory)
        self._reserve_bytes: int | None = None

    def decide(self, reading: DeviceReading, now: float, minute: float) -> Decision:
        """What to do.

        Args:
            now: seconds of any clock that does not go back.
            minute: of the day, by the clock on this device's wall.
        """
        found = [
            self._quiet(minute),
            self._on_battery(reading, now),
            self._in_use(reading, now),
            self._heat(reading, now),
            self._short_of_memory(reading, now),
            self._capped(),
        ]
        causes = [one for one in found if one is not None]
        paused = next((one for one in causes if one.work is Work.PAUSED), None)
        if paused is not None:
            return paused
        return min(causes, key=lambda one: one.share, default=Decision())

    def _pause(self, cause: str, until: str = "") -> Decision:
        return Decision(Work.PAUSED, min(self._limits.used_share, self._cap), cause, until)

    def _slow(self, cause: str) -> Decision:
        return Decision(Work.SLOW, min(self._limits.slow_share, self._cap), cause)

    def _quiet(self, minute: float) -> Decision | None:
        hours = self._manners.quiet
        if hours is None or not hours.contains(minute):
            return None
        return self._pause("quiet hours", hours.end_text)

    def _on_battery(self, reading: DeviceReading, now: float) -> Decision | None:
        holds = self._battery.update(reading.on_battery, now)
        if not holds or self._manners.on_battery == OnBattery.IGNORE:
            return None
        pauses = self._manners.on_battery == OnBattery.PAUSE
        return self._pause("on battery") if pauses else self._slow("on battery")

    def _in_use(self, reading: DeviceReading, now: float) -> Decision | None:
        if not self._manners.when_idle:
            return None
        if reading.idle_seconds is not None:
            used = reading.idle_seconds < self._limits.used_seconds
            held = self._person.update(used, now)
            return self._pause("its person is using it") if held else None
        held = self._load.update(self._is_loaded(reading.others_cpu), now)
        return self._pause("other programs are busy on it") if held else None

    def _is_loaded(self, others_cpu: float | None) -> bool | None:
        """None between the two limits."""
        if others_cpu is None or self._limits.free_cpu < others_cpu < self._limits.busy_cpu:
            return None
        return others_cpu >= self._limits.busy_cpu

    def _heat(self, reading: DeviceReading, now: float) -> Decision | None:
        most, degrees = self._manners.max_temperature, reading.temperature_c
        if most is None:
            return None
        cool = most - self._limits.hotter_degrees
        warm = self._warm.update(_above(degrees, cool, most), now)
        has_slowed = self._warm.held_for(now) >= self._limits.hot_seconds
        too_much = most if has_slowed else most + self._limits.hotter_degrees
        if self._hot.update(_above(degrees, cool, too_much), now):
            return self._pause(f"hotter than {most:g} °C")
        return self._slow(f"hotter than {most:g} °C") if warm else None

    def _short_of_memory(self, reading: DeviceReading, now: float) -> Decision | None:
        free_bytes, limits = reading.available_bytes, self._limits
        if free_bytes is None:
            return None
        if self._reserve_bytes is None:
            self._reserve_bytes = min(int(free_bytes * limits.memory_share), limits.memory_bytes)
        sign = _above(-free_bytes, -4 * self._reserve_bytes, -self._reserve_bytes)
        return self._pause("its memory is nearly full") if self._memory.update(sign, now) else None

    def _capped(self) -> Decision | None:
        if self._cap >= 1:
            return None
        return Decision(
            Work.SLOW, self._cap, f"at most {self._manners.max_cpu:.0%} of its processor"
        )


def _above(value: float | None, least: float, most: float) -> bool | None:
    """Whether it is from `most` on; not, up to `least`; None between and where nothing is known."""
    if value is None or least < value < most:
        return None
    return value >= most
