"""`--private`: which units must stay on the device that holds the data.

The first stage must reach so far that no raw input crosses its end or any later cut, and the last
stage must start before the first unit that sees a label. Where nothing lies between, the holder has
the whole model, as with `plan --private`.
"""

from __future__ import annotations

from p2ptrain.model.description import ModelDescription
from p2ptrain.training.rounds import Mode


def private_units(description: ModelDescription) -> tuple[int, int]:
    """(units at the beginning, units at the end) that only the holder may have.

    (all, 0) where they meet.
    """
    count = len(description.units)
    first = max((_last_raw_boundary(description, mode) for mode in Mode), default=0) + 1
    last = count - min(_first_target_unit(description, mode) for mode in Mode)
    return (first, last) if first + last < count else (count, 0)


def _last_raw_boundary(description: ModelDescription, mode: Mode) -> int:
    """The last cut that a raw input crosses; 0, before the first unit, is always one."""
    raw = {value.name for value in description.crossing(0, mode.value)}
    crossed = [
        boundary
        for boundary in range(len(description.units))
        if raw & {value.name for value in description.crossing(boundary, mode.value)}
    ]
    return max(crossed, default=0)


def _first_target_unit(description: ModelDescription, mode: Mode) -> int:
    users = [
        unit
        for unit in range(len(description.units))
        if description.target_uses(unit, unit + 1, mode.value)
    ]
    return min(users, default=len(description.units) - 1)
