"""What the steps of Asteroid's pipeline cost on every group and range (section 3.3, Eq. 5 and 8).

Groups are neighbours in the order of memory. The paper advises coarser blocks for large models and
grows with the square of the devices too, so both are cut at a grid. Symbols (shapes):

    U   blocks of units, [i, j) a range of them     D   steps of devices, [a, b) a group of them
    G   groups looked at                            K   warm-up depth, which memory must allow
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.plan.coarsen import useful_cuts
from p2ptrain.plan.group_shares import Floats, Rows, SampleTimes, Wholes, divide
from p2ptrain.plan.published import Inner
from p2ptrain.plan.split import BatchSplit

ALL_SIZES = 16
"""Up to so many steps every size of a group is looked at; else powers of two and the last ones."""
ROW_DEVICES = 1 << 20
"""Devices of all rows divided at once: some 100 MB of temporary arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Where stages may begin and end.

    Attributes:
        order: devices of the part by memory, largest first.
        cuts: [U+1] unit numbers; stage borders are among them.
        steps: [D+1] positions in `order`; groups begin and end there.
    """

    order: tuple[int, ...]
    cuts: Wholes
    steps: Wholes

    @property
    def groups(self) -> list[tuple[int, int]]:
        """[a, b) of every group looked at."""
        count = len(self.steps) - 1
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count + 1)]
        if count <= ALL_SIZES:
            return pairs
        return [(a, b) for a, b in pairs if b == count or (b - a).bit_count() == 1]


def make_grid(part: Inner, most_blocks: int, most_steps: int) -> Grid:
    """The grid of at most so many blocks and steps; exact where that is enough."""
    devices = part.cost.devices
    order = sorted(part.devices, key=lambda d: (-devices[d].memory_bytes, devices[d].name))
    inner = [cut for cut in useful_cuts(part.cost, most_blocks + 1) if part.first < cut < part.end]
    count, most = len(order), min(len(order), most_steps)
    steps = [round(step * count / most) for step in range(most + 1)]
    return Grid(tuple(order), np.array([part.first, *inner, part.end]), np.array(steps))


class StepTables:
    """Times of all steps of one grid and batch split; depths are added as they are asked for.

    Attributes:
        group: [D, D+1] number of the group [a, b), -1 where it is not looked at.
        reduce: [G, U, U+1] all-reduce seconds.
        carried: [U] bytes of a micro-batch over the cut before every block.
        rates: [2, D, D+1, D+1] bytes/s from group [a, b) to group [b, c), and back.
    """

    def __init__(self, part: Inner, split: BatchSplit, grid: Grid, *, every_device: bool) -> None:
        self.part, self.split, self.grid = part, split, grid
        self._every_device = every_device
        self._times = SampleTimes(part.cost, split.first_samples)
        self._memory = np.array([part.cost.devices[d].memory_bytes for d in grid.order])
        self._order = np.array(grid.order)
        self._prepare_ranges()
        self._prepare_groups()
        self._rooms: list[Wholes] | None = None
        self._found: tuple[Floats, Floats] | None = None

    def _prepare_ranges(self) -> None:
        blocks = len(self.grid.cuts) - 1
        self._i, self._j = np.triu_indices(blocks, 1, blocks + 1)
        first, end = self.grid.cuts[self._i], self.grid.cuts[self._j]
        held, activations = self.part.held_bytes(), self.part.activation_bytes()
        self._held = held[first - self.part.first, end - self.part.first]  # [ranges]
        self._activations = activations[first - self.part.first, end - self.part.first]
        units = self.part.cost.profile.units
        sums = np.concatenate(([0], np.cumsum([unit.parameter_bytes for unit in units])))
        self._parameters = (sums[end] - sums[first]).astype(np.float64)
        crossing = [units[cut - 1].output_bytes for cut in self.grid.cuts[1:-1]]
        self.carried = self.split.first_samples * np.array([0.0, *crossing])

    def _prepare_groups(self) -> None:
        steps, groups = self.grid.steps, self.grid.groups
        count = len(steps) - 1
        self.group = np.full((count, count + 1), -1)
        for number, (a, b) in enumerate(groups):
            self.group[a, b] = number
        rates = self.part.cost.links.rates[np.ix_(self._order, self._order)]
        least = np.minimum.reduceat(np.minimum.reduceat(rates, steps[:-1], 0), steps[:-1], 1)
        self.rates = np.stack((_rectangles(least), _rectangles(least.T)))
        self.reduce = np.zeros((len(groups), *self._shape))
        for number, (a, b) in enumerate(groups):
            size = int(steps[b] - steps[a])
            if size > 1:
                part = 2 * (size - 1) / size / float(least[a:b, a:b].min())
                self.reduce[number, self._i, self._j] = part * self._parameters

    @property
    def _shape(self) -> tuple[int, int]:
        blocks = len(self.grid.cuts) - 1
        return blocks, blocks + 1

    def execution(self, depth: int) -> tuple[Floats, Floats]:
        """([G, U, U+1] forward, the same backward) seconds at that warm-up depth; inf: impossible.

        Only what memory makes different from the depth asked for before is divided again.
        """
        rooms = [self._room(a, b, depth) for a, b in self.grid.groups]
        if self._rooms is None or self._found is None:
            shape = (len(rooms), *self._shape)
            self._found = np.full(shape, np.inf), np.full(shape, np.inf)
            changed = [np.arange(len(self._i))] * len(rooms)
        else:
            pairs = zip(rooms, self._rooms, strict=True)
            changed = [np.flatnonzero((now != old).any(axis=1)) for now, old in pairs]
            self._found = self._found[0].copy(), self._found[1].copy()
        self._rooms = rooms
        self._divide(rooms, changed)
        return self._found

    def shares(self, a: int, b: int, blocks: tuple[int, int], depth: int) -> tuple[int, ...]:
        """Samples of every device of group [a, b) on a range of blocks."""
        at = np.flatnonzero((self._i == blocks[0]) & (self._j == blocks[1]))
        room = self._room(a, b, depth)[at]
        found = divide(
            self._times,
            self._rows([(a, b)], [at]),
            self.split.first_samples,
            room,
            every_device=self._every_device,
        )
        return tuple(int(share) for share in found.samples[0])

    def _room(self, a: int, b: int, depth: int) -> Wholes:
        """[ranges, g] samples that the group's devices can take, at most a micro-batch."""
        memory = self._memory[self.grid.steps[a] : self.grid.steps[b]]
        left = memory[None, :] - self._held[:, None]
        each = np.maximum(depth * self._activations, 1e-9)[:, None]
        room = np.clip(np.floor(left / each), 0, self.split.first_samples)
        whole: Wholes = np.where(left < 0, 0, room).astype(np.int64)
        return whole

    def _divide(self, rooms: Sequence[Wholes], changed: Sequence[Wholes]) -> None:
        """Run Algorithm 1, groups of one size together."""
        sizes: dict[int, list[int]] = {}
        for number, (a, b) in enumerate(self.grid.groups):
            if len(changed[number]):
                sizes.setdefault(int(self.grid.steps[b] - self.grid.steps[a]), []).append(number)
        for size, numbers in sizes.items():
            if size > self.split.first_samples and self._every_device:
                continue  # not a sample for each
            at_once = max(1, ROW_DEVICES // (size * len(self._i)))
            for first in range(0, len(numbers), at_once):
                self._divide_some(numbers[first : first + at_once], rooms, changed)

    def _divide_some(
        self, numbers: Sequence[int], rooms: Sequence[Wholes], changed: Sequence[Wholes]
    ) -> None:
        if self._found is None:
            raise ValueError("execution() makes the tables first")
        groups, ranges = self.grid.groups, [changed[number] for number in numbers]
        found = divide(
            self._times,
            self._rows([groups[number] for number in numbers], ranges),
            self.split.first_samples,
            np.concatenate([rooms[number][changed[number]] for number in numbers]),
            every_device=self._every_device,
        )
        chosen = np.concatenate(ranges)
        where = np.repeat(numbers, [len(each) for each in ranges])
        for table, seconds in zip(self._found, (found.forward, found.backward), strict=True):
            table[where, self._i[chosen], self._j[chosen]] = seconds

    def _rows(self, groups: Sequence[tuple[int, int]], ranges: Sequence[Wholes]) -> Rows:
        """One row for every group and range."""
        devices = [
            np.broadcast_to(
                self._order[self.grid.steps[a] : self.grid.steps[b]],
                (len(each), self.grid.steps[b] - self.grid.steps[a]),
            )
            for (a, b), each in zip(groups, ranges, strict=True)
        ]
        chosen = np.concatenate(ranges)
        cuts = self.grid.cuts
        return Rows(np.concatenate(devices), cuts[self._i[chosen]], cuts[self._j[chosen]])


def _rectangles(least: Floats) -> Floats:
    """[D, D+1, D+1] least value over rows [a, b) and columns [b, c); inf where empty."""
    count = len(least)
    found = np.full((count, count + 1, count + 1), np.inf)
    for b in range(1, count):
        columns = np.minimum.accumulate(least[:b, b:], axis=1)  # [b, D-b], by c
        found[:b, b, b + 1 :] = np.minimum.accumulate(columns[::-1], axis=0)[::-1]
    return found
