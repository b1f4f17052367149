"""What is known of a job that runs, or that ran last: the facts that `p2ptrain explain` words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from p2ptrain.net.fields import Blob, BlobLimit
from p2ptrain.net.forms import Count, Length, Range, Text

_Name: TypeAlias = Annotated[str, Text(64, clean=True)]

_Reason: TypeAlias = Annotated[str, Text(500, clean=True)]

_Number: TypeAlias = Annotated[float, Range(0.0, math.inf)]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device of the plan.

    Attributes:
        stages: that it has, by number from 0.
        busy_seconds: that it computes in a round.
        expected_seconds: the same as the plan expects it; None where that is not known.
        waits: seconds of a round that it has waited, by what for (`EntryKind` without "wait ");
            empty where no round was watched.
    """

    name: _Name
    stages: Annotated[tuple[Count, ...], Length(256)]
    busy_seconds: _Number
    expected_seconds: _Number | None = None
    waits: Annotated[Mapping[str, _Number], Length(32)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One direction between two devices, as it was watched.

    Attributes:
        busy_seconds: of a round in which something was arriving.
        bytes_per_s: as it was measured before training; None where that is not known.
    """

    sender: _Name
    receiver: _Name
    busy_seconds: _Number
    bytes_per_s: _Number | None = None


@dataclass(frozen=True, slots=True)
class EnergyFacts:
    """What a device has used since the job, or its holder's process, began.

    Attributes:
        joules: None: it cannot be measured.
        of: what that is of.
        why: what is not in it, or why nothing is.
    """

    name: _Name
    joules: _Number | None
    of: _Reason = ""
    why: _Reason = ""


@dataclass(frozen=True, slots=True)
class IdleDevice:
    """One without a part in the plan, and why."""

    name: _Name
    reason: _Reason


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What the planner predicts for another household.

    Attributes:
        change: without `name`, with one more device like `name`, with links twice as fast, or
            `name` alone, which only planner auto considers by itself.
        samples_per_s: None: no plan fits, for that reason.
    """

    change: Literal["now", "without", "one more", "faster links", "alone"]
    name: _Name
    samples_per_s: _Number | None
    reason: _Reason = ""


@dataclass(frozen=True, slots=True)
class JobFacts(Blob):
    """See the module.

    Attributes:
        is_over: the job has ended.
        step: updates that count.
        samples_per_s: measured over the last rounds; None before the first ones.
        predicted_samples_per_s: by the plan in force.
        round_seconds: measured, the median of the last rounds.
        watched_rounds: rounds whose waits and transfers were watched; 0: none.
        what_ifs: "now" is the first where there are any.
        energy: of the devices that it had.
        trained_samples: until the devices were asked for that.
        unasked: why the planner was not asked; empty where it was.
    """

    LIMIT: ClassVar[BlobLimit] = BlobLimit(1 << 20, 50_000)

    model: _Name
    holder: _Name
    is_over: bool
    step: Count
    samples_per_s: _Number | None
    predicted_samples_per_s: _Number
    round_seconds: _Number | None
    watched_rounds: Count
    devices: tuple[DeviceFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    idle: tuple[IdleDevice, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    energy: tuple[EnergyFacts, ...] = ()
    trained_samples: Count = 0
    unasked: _Reason = ""
