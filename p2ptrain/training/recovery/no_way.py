"""Why there is no way to a new epoch: what a change ends with, and what the holder hears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2ptrain.training.recovery.choose import Lost


@dataclass(frozen=True, slots=True)
class NoWay:
    """State is lost, no plan fits, or preparations were spoiled.

    Attributes:
        number: of the request.
        again: what is in the way may pass; ask again after a while.
        spoiled: preparations that failed, one after the other; 0 = nobody could be asked at all.
        lowered: memory in bytes that devices proved to have less of meanwhile, by id.
        is_plan: no plan fits: the person has to change something.
    """

    number: int
    reason: str
    lost: Lost | None = None
    again: bool = False
    spoiled: int = 0
    lowered: Mapping[str, int] = field(default_factory=dict, hash=False)
    is_plan: bool = False
