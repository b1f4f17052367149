"""Where copies of each unit's weights are, so that a dead device takes nothing with it.

Chain replication (Asteroid, section 3.4; FTPipeHD): a stage of one device copies to a device of
the next stage, the last stage to the one before. Devices of a larger group hold the same weights,
so it needs no copies. The copy stands with a neighbour because that is who takes over.

    stage 0  a      a's units also on b
    stage 1  b c    on each other
    stage 2  d      d's units also on c        (b has a copy already)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2ptrain.plan.types.plan import Plan, PlannedStage


@dataclass(frozen=True, slots=True)
class Replicas:
    """Who has each unit's parameters and optimizer state at the version to go on from.

    Attributes:
        holders: by unit, names of devices; those that train the unit come first.
    """

    holders: tuple[tuple[str, ...], ...]

    def holders_of(self, unit: int) -> tuple[str, ...]:
        """Devices that have the unit, those that train it first."""
        return self.holders[unit]

    def without(self, names: Iterable[str]) -> Replicas:
        """What is left once those devices are gone."""
        gone = frozenset(names)
        return Replicas(tuple(tuple(n for n in held if n not in gone) for held in self.holders))


def place_replicas(plan: Plan, *, chain: bool = True, global_at: str | None = None) -> Replicas:
    """Where the copies of a plan's units belong.

    Arguments:
        chain: stages of one device copy to a neighbour.
        global_at: a device (the holder) that has a copy of everything.
    """
    backups = chain_backups(plan) if chain else {}
    holders: list[tuple[str, ...]] = []
    for p, stage in enumerate(plan.stages):
        names = [device.name for device in stage.devices]
        if p in backups:
            names.append(backups[p])
        if global_at is not None:
            names.append(global_at)
        holders += [tuple(dict.fromkeys(names))] * (stage.units[1] - stage.units[0])
    return Replicas(tuple(holders))


def chain_backups(plan: Plan) -> dict[int, str]:
    """By stage of one device, the device that keeps its copy; a lone device has none.

    In a group it is the device with the fewest copies so far, ties to the first listed.
    """
    backups: dict[int, str] = {}
    for p, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            continue
        kept = list(backups.values())
        names = _others(plan, p, stage)
        if names:
            backups[p] = min(names, key=kept.count)
    return backups


def _others(plan: Plan, p: int, stage: PlannedStage) -> list[str]:
    """The next stage's devices; the one before's where there is none, or only the same device."""
    own = stage.devices[0].name
    for neighbour in (p + 1, p - 1):
        if 0 <= neighbour < len(plan.stages):
            names = [d.name for d in plan.stages[neighbour].devices if d.name != own]
            if names:
                return names
    return []
