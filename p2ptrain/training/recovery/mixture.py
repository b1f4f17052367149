"""What FTPipeHD goes on from after a failure: whatever each stage has, for comparisons only. Pure.

Its stages keep the weights that they have, each some updates ahead of the others, and a lost
stage's come from a replica that is older than all of them (section III-F). Together they are
nobody's weights.

    stage 0   live at 41 ──────────────┐
    stage 1   lost; a replica is at 30 ┼──►   all of it is called version 40, which people were
    stage 2   live at 43 ──────────────┘      told of last, and mini-batch 40 comes again

Devices keep what they have under that version's name; from there all is as after any failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from p2ptrain.errors import ProtocolError
from p2ptrain.net.forms import Count, Id, Length, Row
from p2ptrain.net.read_form import read_form
from p2ptrain.training.protocol import FrameFields, check_units
from p2ptrain.training.recovery.choose import Past
from p2ptrain.training.recovery.holdings import (
    HOLDINGS_LIMIT,
    Holding,
    Inventory,
    Kind,
)
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.recovery.rebuild import Rebuild
from p2ptrain.training.recovery.version import Version, VersionRow


@dataclass(frozen=True, slots=True)
class Part:
    """Units [first, end) as they are at `version`."""

    first: Count
    end: Count
    version: VersionRow

    def __post_init__(self) -> None:
        check_units(self.first, self.end)


@dataclass(frozen=True, slots=True)
class Mix(FrameFields):
    """`device` calls what it has another version.

    Attributes:
        parts: of what it has.
        target: the version that they are taken for.
    """

    device: Id
    parts: Annotated[tuple[Annotated[Part, Row()], ...], Length(HOLDINGS_LIMIT, 1)]
    target: VersionRow

    @property
    def made(self) -> tuple[Holding, ...]:
        """What it has then."""
        return tuple(
            Holding(part.first, part.end, self.target, Kind.FETCHED) for part in self.parts
        )


def read_to_be_made(device: str, fields: Mapping[str, Any]) -> Rebuild | Mix | None:
    """What `device` is asked for with an inventory's `fields`. Raises ProtocolError."""
    asked = read_form(_ToBeMade, fields, "epoch.inventory", extra=True)
    made = asked.rebuild or asked.mix
    if made is not None and made.device != device:
        raise ProtocolError("what is to be made is asked of another device")
    return made


@dataclass(frozen=True, slots=True)
class _ToBeMade:
    rebuild: Rebuild | None = None
    mix: Mix | None = None


def mixture(
    units: int, inventories: Mapping[str, Inventory], past: Past, present: Placed | None
) -> tuple[Mix, ...]:
    """What devices must call the version that people were told of last.

    Returns:
        One for each device that must; none where a unit is nowhere, so that the newest version
        that is whole is gone back to, or where the epoch has made no step yet.
    """
    if present is None or past.reported <= present.version.step:
        return ()
    target = Version(past.reported, present.epoch)
    chosen: dict[str, list[Part]] = {}
    unit = 0
    while unit < units:
        best = max(
            (
                (holding.kind is Kind.LIVE, holding.version.age, device, holding)
                for device in sorted(inventories)
                for holding in inventories[device].holdings
                if holding.has(unit) and past.lineage.is_valid(holding.version)
            ),
            key=lambda one: one[:3],
            default=None,
        )
        if best is None:
            return ()
        device, holding = best[2:]
        end = min(holding.end, units)
        if holding.version != target:
            chosen.setdefault(device, []).append(Part(unit, end, holding.version))
        unit = end
    return tuple(Mix(device, tuple(parts), target) for device, parts in sorted(chosen.items()))
