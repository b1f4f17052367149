"""What a device's person asks of its manners: the options of `join`, and `p2ptrain.Manners`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.errors import OptionError

DAY_MINUTES = 24 * 60

_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?", re.ASCII)


class OnBattery(StrEnum):
    """What a device does while it draws on its battery."""

    PAUSE = "pause"
    SLOW = "slow"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class QuietHours:
    """From one minute of the day to another, over midnight where that is the earlier one."""

    begin_minute: int
    end_minute: int

    @classmethod
    def parse(cls, text: str) -> QuietHours:
        """Of "22-7" or "22:30-6:45". Raises OptionError."""
        begin, dash, end = text.replace(" ", "").partition("-")
        minutes = [_minute(part) for part in (begin, end)]
        if not dash or None in minutes:
            raise OptionError(
                f"{text!r} are no quiet hours: write two times of day such as 22-7 or 22:30-6:45"
            )
        first, last = (minute % DAY_MINUTES for minute in minutes if minute is not None)
        if first == last:
            raise OptionError(f"{text!r} begin and end at once: quiet hours are less than a day")
        return cls(first, last)

    def contains(self, minute: float) -> bool:
        """Whether a minute of the day lies in them; the first does, the last does not."""
        if self.begin_minute < self.end_minute:
            return self.begin_minute <= minute < self.end_minute
        return minute >= self.begin_minute or minute < self.end_minute

    @property
    def end_text(self) -> str:
        """Such as "7:00"."""
        return f"{self.end_minute // 60}:{self.end_minute % 60:02}"


def _minute(text: str) -> int | None:
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    hour, minute = int(match[1]), int(match[2] or 0)
    return hour * 60 + minute if minute < 60 and hour * 60 + minute <= DAY_MINUTES else None


@dataclass(frozen=True, slots=True)
class Manners:
    """How a device looks after its person. As it is made, only its memory is looked after.

    Args:
        when_idle: take part only while the device's person does not use it.
        max_cpu: part of the processor that p2ptrain may use over some seconds, above 0, at most 1.
        on_battery: "pause", "slow" or "ignore", while the device draws on its battery.
        max_temperature: in degrees Celsius, of the hottest sensor: from there on it slows down, and
            pauses where that does not help.
        quiet_hours: local times of day such as "22-7", in which it takes no part.

    Raises:
        OptionError: a value that cannot be meant.
    """

    when_idle: bool = False
    max_cpu: float = 1.0
    on_battery: str = OnBattery.IGNORE
    max_temperature: float | None = None
    quiet_hours: str | QuietHours | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.when_idle, bool):
            raise OptionError(f"when_idle must be True or False, not {self.when_idle!r}")
        if not (_is_number(self.max_cpu) and 0 < self.max_cpu <= 1):
            raise OptionError(f"max_cpu must be above 0 and at most 1, not {self.max_cpu!r}")
        if self.on_battery not in list(OnBattery):
            raise OptionError(f"on_battery must be one of {choices()}, not {self.on_battery!r}")
        most = self.max_temperature
        if most is not None and not (_is_number(most) and 30 <= most <= 120):
            raise OptionError(f"max_temperature must be from 30 to 120 degrees, not {most!r}")
        if isinstance(self.quiet_hours, str):
            object.__setattr__(self, "quiet_hours", QuietHours.parse(self.quiet_hours))
        elif not isinstance(self.quiet_hours, QuietHours | None):
            raise OptionError(f'quiet_hours must be a text such as "22-7": {self.quiet_hours!r}')

    @property
    def quiet(self) -> QuietHours | None:
        """The quiet hours."""
        return self.quiet_hours if isinstance(self.quiet_hours, QuietHours) else None


def choices() -> str:
    """Of what to do on a battery."""
    return ", ".join(OnBattery)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
