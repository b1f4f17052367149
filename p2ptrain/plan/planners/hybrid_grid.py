"""Where Asteroid's stages may begin and end, and what the steps of its pipeline cost there.

Groups are neighbours in the order of memory. The paper advises coarser blocks for large models
(section 5.7), and the work grows with the square of the devices too, so both lie on a grid. On each
of its groups and ranges `StepTables` has a stage's and a link's seconds (section 3.3, Eq. 5 and 8).
Symbols (shapes):

    U   blocks of units     [i, j) a range of them, U(U+1)/2 in all     N   devices
    D   steps of devices    [a, b) a group of them                      G   groups looked at
    B   samples of a micro-batch     K   warm-up depth, which memory must allow
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from p2ptrain.plan.planners.group_shares import Floats, Rows, SampleTimes, Truths, Wholes, divide
from p2ptrain.plan.planners.published import Inner
from p2ptrain.plan.problem.candidates import useful_cuts
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.gradient_sums import ring_seconds

ALL_SIZES = 16
"""Up to so many steps every size of a group is looked at; else powers of two and the last ones."""

BOUNDLESS = 1 << 40
"""Room of a device for units that keep nothing: more samples than any batch has."""


@dataclass(frozen=True, eq=False)  # no slots: cached_property keeps its values in the instance
class Grid:
    """Where stages may begin and end.

    Attributes:
        order: [N] devices of the part by memory, largest first.
        cuts: [U+1] unit numbers; stage borders are among them.
        steps: [D+1] positions in `order`; groups begin and end there.
    """

    part: Inner
    order: tuple[int, ...]
    cuts: Wholes
    steps: Wholes

    @property
    def blocks(self) -> int:
        """U."""
        return len(self.cuts) - 1

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """[G] (a, b) of every group looked at."""
        count = len(self.steps) - 1
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count + 1)]
        if count <= ALL_SIZES:
            return pairs
        return [(a, b) for a, b in pairs if b == count or (b - a).bit_count() == 1]

    @cached_property
    def numbers(self) -> Wholes:
        """[D, D+1] number of the group [a, b); -1 where it is not looked at."""
        count = len(self.steps) - 1
        found = np.full((count, count + 1), -1)
        for number, group in enumerate(self.groups):
            found[group] = number
        return found

    @cached_property
    def first(self) -> Wholes:
        """[ranges] first block i of every range."""
        return np.triu_indices(self.blocks, 1, self.blocks + 1)[0]

    @cached_property
    def end(self) -> Wholes:
        """[ranges] end block j of every range."""
        return np.triu_indices(self.blocks, 1, self.blocks + 1)[1]

    @cached_property
    def room(self) -> Wholes:
        """[N, ranges] samples that every device can keep in flight there; 0 = not even one."""
        first, end = self.cuts[self.first], self.cuts[self.end]
        held = self.part.held_bytes()[first - self.part.first, end - self.part.first]
        kept = self.part.activation_bytes()[first - self.part.first, end - self.part.first]
        devices = self.part.cost.devices
        memory = np.array([float(devices[d].memory_bytes) for d in self.order])
        left = np.maximum(memory[:, None] - held, -1.0)
        samples = np.minimum(np.floor(left / np.maximum(kept, 1e-9)), BOUNDLESS)
        room: Wholes = np.where(left < 0, 0, samples).astype(np.int64)
        return room

    @cached_property
    def output_bytes(self) -> Floats:
        """[U] bytes a sample over the cut before every block."""
        units = self.part.cost.profile.units
        return np.array([0.0, *(units[cut - 1].output_bytes for cut in self.cuts[1:-1])])

    @cached_property
    def reduce(self) -> Floats:
        """[G, U, U+1] seconds of a group's all-reduce (Eq. 5)."""
        states = self.part.cost.unit_states
        sums = np.concatenate(([0], np.cumsum([state.summed_bytes for state in states])))
        summed = (sums[self.cuts[self.end]] - sums[self.cuts[self.first]]).astype(np.float64)
        found = np.zeros((len(self.groups), self.blocks, self.blocks + 1))
        for number, (a, b) in enumerate(self.groups):
            size = int(self.steps[b] - self.steps[a])
            if size > 1:
                rate = float(self._least[a:b, a:b].min())
                found[number, self.first, self.end] = summed * ring_seconds(size, 1.0, rate)
        return found

    @cached_property
    def rates(self) -> Floats:
        """[2, D, D+1, D+1] least bytes/s from group [a, b) to group [b, c), and back."""
        return np.stack((_rectangles(self._least), _rectangles(self._least.T)))

    @cached_property
    def _least(self) -> Floats:
        """[D, D] least bytes/s from the devices of one step to those of another."""
        starts = self.steps[:-1]
        rates = self.part.cost.links.rates[np.ix_(self.order, self.order)]
        least: Floats = np.minimum.reduceat(np.minimum.reduceat(rates, starts, 0), starts, 1)
        return least


def make_grid(part: Inner, most_blocks: int, most_steps: int) -> Grid:
    """The grid of at most so many blocks and steps; exact where that is enough."""
    devices = part.cost.devices
    order = sorted(part.devices, key=lambda d: (-devices[d].memory_bytes, devices[d].name))
    inner = [cut for cut in useful_cuts(part.cost, most_blocks + 1) if part.first < cut < part.end]
    count, most = len(order), min(len(order), most_steps)
    steps = [round(step * count / most) for step in range(most + 1)]
    return Grid(part, tuple(order), np.array([part.first, *inner, part.end]), np.array(steps))


def _rectangles(least: Floats) -> Floats:
    """[D, D+1, D+1] least value over rows [a, b) and columns [b, c); inf where empty."""
    count = len(least)
    found = np.full((count, count + 1, count + 1), np.inf)
    for b in range(1, count):
        columns = np.minimum.accumulate(least[:b, b:], axis=1)  # [b, D-b], by c
        found[:b, b, b + 1 :] = np.minimum.accumulate(columns[::-1], axis=0)[::-1]
    return found


ROW_DEVICES = 1 << 20
"""Devices of all rows divided at once: some 100 MB of temporary arrays."""


class StepTables:
    """Times of all stages of one grid and batch split; depths are added as they are asked for.

    Arguments:
        every_device: each device of a group takes a sample; else those without room take none.
    """

    def __init__(
        self, grid: Grid, times: SampleTimes, split: BatchSplit, *, every_device: bool
    ) -> None:
        self.grid, self.split = grid, split
        self._times, self._every_device = times, every_device
        self._room: Wholes | None = None
        shape = (len(grid.groups), grid.blocks, grid.blocks + 1)
        self._seconds = np.full(shape, np.inf), np.full(shape, np.inf)

    @property
    def memory_binds(self) -> bool:
        """Whether at the depth asked for last some device could not take a whole micro-batch."""
        return self._room is None or bool((self._room < self.split.first_samples).any())

    def execution(self, depth: int) -> tuple[Floats, Floats]:
        """([G, U, U+1] forward, the same backward) seconds at that warm-up depth; inf: impossible.

        Only what memory makes different from the depth asked for before is divided again.
        """
        room = self._room_at(depth)
        before = np.full_like(room, -1) if self._room is None else self._room
        changed = room != before
        if changed.any():
            self._seconds = self._seconds[0].copy(), self._seconds[1].copy()
            self._divide(room, changed)
        self._room = room
        return self._seconds

    def shares(self, a: int, b: int, blocks: tuple[int, int], depth: int) -> tuple[int, ...]:
        """Samples of every device of group [a, b) on a range of blocks."""
        grid = self.grid
        chosen = np.flatnonzero((grid.first == blocks[0]) & (grid.end == blocks[1]))
        members = slice(grid.steps[a], grid.steps[b])
        room = self._room_at(depth)[members, chosen].T
        found = divide(
            self._times,
            self._rows([(a, b)], [chosen]),
            self.split.first_samples,
            room,
            every_device=self._every_device,
        )
        return tuple(int(share) for share in found.samples[0])

    def _room_at(self, depth: int) -> Wholes:
        """[N, ranges] samples that every device could take, at most a micro-batch."""
        room: Wholes = np.minimum(self.grid.room // depth, self.split.first_samples)
        return room

    def _divide(self, room: Wholes, changed: Truths) -> None:
        """Run Algorithm 1, groups of one size together."""
        grid, steps, sizes = self.grid, self.grid.steps, dict[int, list[int]]()
        for number, (a, b) in enumerate(grid.groups):
            if not grid.part.cost.may_share(grid.order[steps[a] : steps[b]]):
                continue
            sizes.setdefault(int(steps[b] - steps[a]), []).append(number)
        for size, numbers in sizes.items():
            if size > self.split.first_samples and self._every_device:
                continue  # not a sample for each
            at_once = max(1, ROW_DEVICES // (size * len(grid.first)))
            for first in range(0, len(numbers), at_once):
                self._divide_some(numbers[first : first + at_once], room, changed)

    def _divide_some(self, numbers: Sequence[int], room: Wholes, changed: Truths) -> None:
        steps, groups = self.grid.steps, [self.grid.groups[number] for number in numbers]
        members = [slice(steps[a], steps[b]) for a, b in groups]
        ranges = [np.flatnonzero(changed[part].any(axis=0)) for part in members]
        chosen = np.concatenate(ranges)
        if not len(chosen):
            return
        limits = [room[part][:, each].T for part, each in zip(members, ranges, strict=True)]
        found = divide(
            self._times,
            self._rows(groups, ranges),
            self.split.first_samples,
            np.concatenate(limits),
            every_device=self._every_device,
        )
        where = np.repeat(numbers, [len(each) for each in ranges])
        for table, seconds in zip(self._seconds, (found.forward, found.backward), strict=True):
            table[where, self.grid.first[chosen], self.grid.end[chosen]] = seconds

    def _rows(self, groups: Sequence[tuple[int, int]], ranges: Sequence[Wholes]) -> Rows:
        """One row for every group and range."""
        grid, chosen = self.grid, np.concatenate(ranges)
        order = np.array(grid.order)
        devices = [
            np.tile(order[grid.steps[a] : grid.steps[b]], (len(each), 1))
            for (a, b), each in zip(groups, ranges, strict=True)
        ]
        first, end = grid.cuts[grid.first[chosen]], grid.cuts[grid.end[chosen]]
        return Rows(np.concatenate(devices), first, end)
