"""What to write instead of torch's control flow, whose branches and loops are no plain operators.

Named in two places: where a graph holds it, and where it fixes the batch size before there is one.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

_FOLDER = "_higher_order_ops"
_A_LOOP = "a Python loop over that dimension, whose number of steps is the same for every batch"

_INSTEAD: Mapping[str, str] = {
    "cond": "Compute both branches and choose: torch.where(condition, one, other)",
    "while_loop": (
        "Use a Python loop with as many steps as may be needed, and torch.where(done, value, next) "
        "in it"
    ),
    "scan": f"Use {_A_LOOP}",
    "map": "Use torch.vmap, or operations on the whole batch",
    "associative_scan": f"Use torch.cumsum, cumprod or cummax where it is one, or {_A_LOOP}",
}


def instead_of(name: str) -> str | None:
    """What to write instead of the operator `name`; None where it is none of these."""
    return _INSTEAD.get(name.removesuffix("_impl"))


def control_flow_in(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """The name of the first of these operators that a call stack, outermost frame first, enters."""
    files = (Path(frame.filename) for frame in stack)
    inside = (file.stem for file in files if file.parent.name == _FOLDER)
    return next((name for name in inside if name in _INSTEAD), None)
