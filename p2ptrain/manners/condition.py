"""What a device says of itself to the others: how hard it works, and in one sentence why.

It stands among what a member says of itself (`Member.info`), beside what never changes. Others show
it, plan without a device that rests, and look again once it works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from p2ptrain.errors import ProtocolError
from p2ptrain.net.forms import Bytes, Flat, Range, Rare, Text, write_form
from p2ptrain.net.read_form import read_form


class Work(StrEnum):
    """How hard a device works for the household."""

    FULL = "full"
    SLOW = "slow"
    """It computes, with pauses."""
    PAUSED = "paused"
    """It is a member and takes no part in trainings."""


Percent: TypeAlias = Annotated[int, Range(0, 100)]

Power: TypeAlias = Literal["mains", "battery"]


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """On one device; None: not known, or it has no accelerator.

    Attributes:
        used_bytes: of the host's memory that p2ptrain may use there, what jobs take.
        card_bytes, card_used_bytes, card_offered_bytes: an accelerator's memory, what p2ptrain has
            taken of it, and what it may use there.
    """

    used_bytes: Bytes | None = None
    card_bytes: Bytes | None = None
    card_used_bytes: Bytes | None = None
    card_offered_bytes: Bytes | None = None


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """What others may know of a device's state; None: the device cannot know it.

    Attributes:
        sentence: why it does not work as hard as it could, such as "paused: on battery"; else "".
        others_cpu_percent: of all its cores together, used by other programs.
        temperature_c: of its hottest sensor.
    """

    work: Annotated[Work, Rare()] = Work.FULL
    sentence: Annotated[str, Text(160, clean=True), Rare()] = ""
    others_cpu_percent: Percent | None = None
    battery_percent: Percent | None = None
    power: Power | None = None
    temperature_c: Annotated[int, Range(-100, 1000)] | None = None
    memory: Annotated[MemoryInUse, Flat()] = MemoryInUse()

    def to_info(self) -> dict[str, int | float | str]:
        """Its items among those of `Member.info`."""
        return write_form(self)

    @classmethod
    def of_info(cls, info: Mapping[str, object]) -> DeviceCondition:
        """What a member says; of one that says something else, nothing is known."""
        try:
            return read_form(cls, dict(info), "a condition", extra=True)
        except ProtocolError:
            return cls()


KEYS = frozenset(field.name for field in (*fields(DeviceCondition), *fields(MemoryInUse)))


def rests(info: Mapping[str, object]) -> bool:
    """Whether a member takes no part in trainings now."""
    return info.get("work") == Work.PAUSED


@dataclass(frozen=True, slots=True)
class SayingLimits:
    """When numbers have changed enough to be said again.

    Attributes:
        seconds: so long after the last time; what a device does is said at once.
        percent: of load and battery.
        memory_bytes: of memory in use.
    """

    seconds: float = 15.0
    percent: int = 10
    degrees: int = 5
    memory_bytes: int = 32 << 20


USUAL_SAYING = SayingLimits()


def is_worth_saying(
    said: DeviceCondition, now: DeviceCondition, seconds_ago: float, limits: SayingLimits
) -> bool:
    """Whether the others are to know of a change: every word costs each of them a message."""
    if _without_numbers(said) != _without_numbers(now):
        return True
    if seconds_ago < limits.seconds:
        return False
    return (
        _moved(said.others_cpu_percent, now.others_cpu_percent, limits.percent)
        or _moved(said.battery_percent, now.battery_percent, limits.percent)
        or _moved(said.temperature_c, now.temperature_c, limits.degrees)
        or _moved(said.memory.used_bytes, now.memory.used_bytes, limits.memory_bytes)
        or _moved(said.memory.card_used_bytes, now.memory.card_used_bytes, limits.memory_bytes)
    )


def _without_numbers(one: DeviceCondition) -> DeviceCondition:
    return DeviceCondition(work=one.work, sentence=one.sentence, power=one.power)


def _moved(one: int | None, other: int | None, least: int) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) >= least
