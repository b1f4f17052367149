"""What a holder needs for the next generation when one ends, and why there may be no way to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.recovery.choose_version import KnownPast, StateLost
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.version import Version

GENERATIONS_PER_REQUEST = 64
"""Generation numbers that one request may use up: so they are unique, also over the
holder's restarts."""


class ReconfigureReason(StrEnum):
    """Why a plan is asked for."""

    START = "start"
    FAILURE = "failure"
    JOIN = "join"
    LEAVE = "leave"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request; what else counts is in the state reports.

    Attributes:
        generation: first generation number to use; GENERATIONS_PER_REQUEST may be used. It rises,
            also over the holder's restarts, and so is the request's number too.
        units: of the model.
        holder: id of the device with the data.
        alive: devices that the holder sees alive, itself included.
        past: see choose.
        present: the plan that was in force, None at the start.
        stable: newest version of which every copy was acknowledged.
        without: devices that are leaving: they may give, but get nothing.
        lowered: what devices proved to have less memory of, by id.
    """

    generation: int
    reason: ReconfigureReason
    units: int
    holder: str
    alive: frozenset[str]
    past: KnownPast
    present: Placement | None = None
    stable: Version | None = None
    without: frozenset[str] = frozenset()
    lowered: Mapping[str, MemoryBudgets] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ReconfigureFailure:
    """State is lost, no plan fits, or preparations were spoiled.

    Attributes:
        number: of the request.
        again: what is in the way may pass; ask again after a while.
        spoiled: preparations that failed, one after the other; 0 = no device could be asked at all.
        lowered: what devices proved to have less memory of meanwhile, by id.
        is_plan: no plan fits: the person has to change something.
    """

    number: int
    reason: str
    lost: StateLost | None = None
    again: bool = False
    spoiled: int = 0
    lowered: Mapping[str, MemoryBudgets] = field(default_factory=dict, hash=False)
    is_plan: bool = False


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """A device's part of a generation will not stand.

    Attributes:
        source: the peer that could not deliver.
        short: which memory of this device was too small.
        is_link: only the link to it ended.
    """

    reason: str
    source: str | None = None
    short: MemoryShortage | None = None
    is_link: bool = False
