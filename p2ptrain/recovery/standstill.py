"""When nothing moves any more: whether a round will never end, and who keeps something back. Pure.

Progress counts, not time: on a slow device one task takes minutes, on a slow link one tensor does
(`StallDetector`).

`unsent`: which device has not sent what it must have made. Stages wait for each other in a circle
as soon as one slice is missing:

    stage 1   F0 F1 F2 | waits for gradient 0        has passed F0: its activation was due
    stage 2   waits for activation 0                 has not begun: no gradient is due of it

A stage does its tasks in a fixed order, and what it waits for says how far it has come. So of two
that wait for each other exactly one has passed the task whose result the other waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from p2ptrain.net.fields import Blob, FrameFields
from p2ptrain.net.forms import Bytes, Count, Length, Range, Seconds, Text
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings

QUIET_BYTES = 128 << 10
"""Membership alone moves less on a device's links meanwhile; a link of 64 kbit/s twice as much."""

QUESTION_BYTES = 1 << 10
"""To ask a device for its counters. The holder moves so many for each device."""


@dataclass(frozen=True, slots=True)
class ProgressCounters(FrameFields):
    """What a device has done; each only rises.

    Attributes:
        tasks: that its compute thread has finished.
        link_bytes: over all its links, both ways.
        cpu_seconds: of its process.
    """

    tasks: Count
    link_bytes: Bytes
    cpu_seconds: Seconds


class StallDetector:
    """See the module. Pure: times are seconds of any monotonic clock.

    Args:
        now: when the generation began.
    """

    def __init__(self, now: float, settings: RecoverySettings = HOME) -> None:
        self._settings = settings
        self._since = now
        self._before: Mapping[str, ProgressCounters] | None = None

    @property
    def due(self) -> float:
        """When to look next."""
        return self._since + self._settings.quiet_seconds

    def moved(self, now: float) -> None:
        """A stage has reported, or no report is due."""
        self._since, self._before = now, None

    def look(self, counters: Mapping[str, ProgressCounters], now: float) -> bool:
        """Whether nothing has moved since the look before."""
        before, self._before, self._since = self._before, counters, now
        if before is None:
            return False
        return not has_moved(before, counters, self._settings.quiet_seconds, self._settings)


def has_moved(
    before: Mapping[str, ProgressCounters],
    now: Mapping[str, ProgressCounters],
    seconds: float,
    settings: RecoverySettings = HOME,
) -> bool:
    """Whether anything has within so many seconds."""
    part, asked = seconds / settings.quiet_seconds, QUESTION_BYTES * len(now)

    def has(old: ProgressCounters | None, new: ProgressCounters) -> bool:
        return old is None or (
            new.tasks > old.tasks
            or new.link_bytes > old.link_bytes + part * QUIET_BYTES + asked
            or new.cpu_seconds > old.cpu_seconds + part * settings.quiet_cpu_seconds
        )

    return any(has(before.get(device), new) for device, new in now.items())


_STAGES = 4096

_Stage = Annotated[int, Range(0, _STAGES)]

_Number = Annotated[int, Range(0, 2**53)]

_Ids = Annotated[frozenset[Annotated[str, Text(64)]], Length(_STAGES)]


@dataclass(frozen=True, slots=True)
class MissingPiece:
    """A stage on a device waits for a piece.

    Attributes:
        backward: for gradients; else for activations.
        senders: ids of those whose part has not come.
        seconds: for so long.
    """

    stage: _Stage
    backward: bool
    round: _Number
    micro_batch: _Number
    senders: _Ids
    seconds: Annotated[float, Range(0.0)]


@dataclass(frozen=True, slots=True)
class Standing(Blob):
    """What a device says of itself.

    Attributes:
        waits: of its stages.
        rounds: (stage, round) of its stages: what each has begun last.
        is_busy: it computes, or waits for others with which it shares a stage.
        suspects: ids of members that it may have lost touch with.
    """

    waits: Annotated[tuple[MissingPiece, ...], Length(_STAGES)]
    rounds: Annotated[tuple[tuple[_Stage, _Number], ...], Length(_STAGES)]
    is_busy: bool
    suspects: _Ids


@dataclass(frozen=True, slots=True)
class Unsent:
    """`sender` must have made what `receiver` waits for."""

    sender: str
    receiver: str
    wait: MissingPiece


def unsent(
    standings: Mapping[str, Standing], warmups: Sequence[int], least_seconds: float
) -> Unsent | None:
    """The first piece that was due and has not come; None where a device may still compute it.

    Args:
        standings: by id, of all devices of the plan.
        warmups: K_p of each stage.
        least_seconds: of a wait.
    """
    found = [
        Unsent(sender, receiver, wait)
        for receiver, standing in standings.items()
        for wait in standing.waits
        if wait.seconds >= least_seconds
        for sender in sorted(wait.senders & standings.keys() - standing.suspects)
        if _has_passed(standings[sender], receiver, wait, warmups)
    ]
    return min(found, key=lambda one: (one.wait.round, one.wait.micro_batch), default=None)


def _has_passed(
    sender: Standing, receiver: str, wait: MissingPiece, warmups: Sequence[int]
) -> bool:
    stage = wait.stage + 1 if wait.backward else wait.stage - 1
    if sender.is_busy or receiver in sender.suspects or not 0 <= stage < len(warmups):
        return False
    made = wait.round, float(_place(wait.backward, wait.micro_batch, warmups[stage]))
    come = [
        (other.round, float(_place(other.backward, other.micro_batch, warmups[stage])))
        for other in sender.waits
        if other.stage == stage
    ]
    if not come:  # between two rounds
        come = [(number, math.inf) for at, number in sender.rounds if at == stage]
    return bool(come) and min(come) > made


def _place(backward: bool, micro_batch: int, warmup: int) -> int:
    """Of a task in the order of its stage: so many forwards, then a backward and a forward in turn.

    That there are no forwards left at a round's end changes nothing of the order.
    """
    if backward:
        return warmup + 2 * micro_batch
    return micro_batch if micro_batch < warmup else 2 * micro_batch - warmup + 1
