"""What the steps of Asteroid's pipeline cost on every group and range (section 3.3, Eq. 5 and 8).

Symbols (shapes), beside those of `hybrid_grid.py`:

    B   samples of a micro-batch     K   warm-up depth, which memory must allow
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2ptrain.plan.planners.group_shares import Floats, Rows, SampleTimes, Truths, Wholes, divide
from p2ptrain.plan.planners.hybrid_grid import Grid
from p2ptrain.plan.types.batch_split import BatchSplit

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
        steps, sizes = self.grid.steps, dict[int, list[int]]()
        for number, (a, b) in enumerate(self.grid.groups):
            sizes.setdefault(int(steps[b] - steps[a]), []).append(number)
        for size, numbers in sizes.items():
            if size > self.split.first_samples and self._every_device:
                continue  # not a sample for each
            at_once = max(1, ROW_DEVICES // (size * len(self.grid.first)))
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
