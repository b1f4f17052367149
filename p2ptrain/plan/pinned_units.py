"""Units that must stay together at either end, planned as one.

`--private` keeps more than the outermost units on the data holder where raw inputs or labels are
used further in. Folding them to one unit each lets every planner obey without knowing why. Where
both ends meet there is one unit, all of the holder's.

    units     0 1 2 3 4 5 6 7        first = 3, last = 2
    folded    [0 1 2] 3 4 5 [6 7]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes


@dataclass(frozen=True, slots=True)
class PinnedUnits:
    """How `count` units become fewer: the first `first` are one, the last `last` are one.

    `first` is at least 1; `last` is 0 where `first` is all of them, else at least 1.
    """

    count: int
    first: int
    last: int

    def profile(self, profile: Profile) -> Profile:
        """The profile of the folded units."""
        folded = tuple(_join(profile.units[first:end]) for first, end in self._ranges)
        return replace(profile, units=folded, times=self._times(profile.times))

    def cluster(self, cluster: Cluster) -> Cluster:
        """The same devices, their own times folded."""
        devices = tuple(
            device if device.times is None else replace(device, times=self._times(device.times))
            for device in cluster.devices
        )
        return replace(cluster, devices=devices)

    def unfold(self, plan: Plan) -> Plan:
        """A plan of the folded units, as one of the real ones."""
        stages = tuple(
            replace(stage, units=(self._borders[stage.units[0]], self._borders[stage.units[1]]))
            for stage in plan.stages
        )
        return replace(plan, stages=stages)

    @property
    def _ranges(self) -> tuple[tuple[int, int], ...]:
        """[first, end) in real units of every folded one."""
        return tuple(pairwise(self._borders))

    @property
    def _borders(self) -> tuple[int, ...]:
        """The real boundary of every folded one."""
        inner = range(self.first, self.count - self.last + 1)
        return (0, *inner, self.count) if self.last else (0, *inner)

    def _times(self, table: TimeTable) -> TimeTable:
        times = tuple(
            UnitTimes(
                self._sums(entry.forward),
                self._sums(entry.backward),
                self._sums(entry.weight) if entry.weight else (),
            )
            for entry in table.times
        )
        return TimeTable(table.sizes, times)

    def _sums(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[first:end]) for first, end in self._ranges)


def _join(units: Sequence[Unit]) -> Unit:
    """One unit that costs what `units` cost together; its output is the last one's."""
    if len(units) == 1:
        return units[0]
    return Unit(
        name=f"{units[0].name}..{units[-1].name}",
        parameter_bytes=sum(unit.parameter_bytes for unit in units),
        output_bytes=units[-1].output_bytes,
        activation_bytes=sum(unit.activation_bytes for unit in units),
        flops=sum(unit.flops for unit in units),
        trainable_bytes=sum(unit.trained_bytes for unit in units),
        passing_bytes=max(unit.passing_bytes or 0 for unit in units),
    )
