"""Why nothing fits, in few words: many ways are tried, and most of them fail for one reason."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.errors import PlanError
from p2ptrain.size_text import size_text


class NoTile(PlanError):
    """A device has no memory for any tile beside what it must hold in any case."""

    def __init__(self, name: str, needed_bytes: float, offered_bytes: float) -> None:
        super().__init__(
            f"{name} has too little memory for a tile: it needs more than "
            f"{size_text(needed_bytes)} and has {size_text(offered_bytes)}; give it more, leave "
            "it out, or try --planner auto"
        )
        self.name, self.needed_bytes = name, needed_bytes


class NothingFits(PlanError):
    """No way that was tried; `reasons` are those of each."""

    def __init__(self, reasons: Sequence[PlanError]) -> None:
        super().__init__(told(reasons))
        self.reasons = tuple(reasons)


def told(reasons: Sequence[PlanError]) -> str:
    """Each once, and of a device without room for tiles only what it lacks where that is least."""
    least: dict[str, NoTile] = {}
    for reason in reasons:
        if isinstance(reason, NoTile):
            kept = least.setdefault(reason.name, reason)
            least[reason.name] = min(kept, reason, key=lambda one: one.needed_bytes)
    shown = [least[one.name] if isinstance(one, NoTile) else one for one in reasons]
    return "; ".join(dict.fromkeys(map(str, shown)))
