"""How the devices of one stage divide a micro-batch: Asteroid's Algorithm 1 (section 3.3).

Phase 1, memory-aware balancing: every device takes its part by capacity, at most what its memory
takes, and what is left over is divided again among those with room. With capacities 3 : 1 : 1, ten
samples and room for four on the first device:

    first pass      4 2 2      (6 2 2 wanted)
    what is left    4 3 3

Phase 2, offloading: capacity is measured at the whole micro-batch, and time is not linear in the
samples, so blocks of samples move from the slowest device to the fastest with room as long as that
makes the slowest faster.

All of this runs on many (group, units) pairs at once: R rows of g devices each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost.cost_model import CostModel

Floats: TypeAlias = NDArray[np.float64]

Wholes: TypeAlias = NDArray[np.int64]

Truths: TypeAlias = NDArray[np.bool_]

BLOCKS = 32
"""A micro-batch is first moved in blocks of this part of it, then sample by sample."""

MAX_BLOCK = 64
"""Larger blocks are followed by blocks of that part of them, not at once by single samples."""

INSTANT = 1e-12
"""Seconds that a stage takes at least, so that units without time have a finite capacity."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R stages to divide, all of g devices.

    Attributes:
        devices: [R, g] indexes of the cost model.
        first, end: [R] units.
    """

    devices: Wholes
    first: Wholes
    end: Wholes

    def __getitem__(self, chosen: Wholes | Truths) -> Rows:
        return Rows(self.devices[chosen], self.first[chosen], self.end[chosen])

    def __len__(self) -> int:
        return len(self.first)


class SampleTimes:
    """Seconds of unit ranges on devices for 0..most samples, for many rows at once.

    Times are linear between knots (`TimeTable.at`): half the smallest measured size, below which
    they are constant, the measured sizes, and `most`.
    """

    def __init__(self, cost: CostModel, most: int) -> None:
        count = len(cost.devices)
        tables = [device.times or cost.profile.times for device in cost.devices]
        sizes = list(dict.fromkeys(table.sizes for table in tables))
        knots = 2 + max(len(each) for each in sizes)
        self._kind = np.array([sizes.index(table.sizes) for table in tables])
        self._knots = [_knots(each, most) for each in sizes]
        self._forward = np.zeros((count, knots, cost.unit_count + 1))
        self._backward = np.zeros_like(self._forward)
        for d, table in enumerate(tables):
            self._fill(cost, d, table.sizes, max(most, table.sizes[-1] + 1))
        self._both = self._forward + self._backward

    def _fill(self, cost: CostModel, device: int, sizes: Sequence[int], largest: int) -> None:
        for k, size in enumerate((sizes[0], *sizes, largest)):
            times = cost.unit_times(device, size)
            scale = 0.5 if k == 0 else 1.0
            np.cumsum(np.multiply(times.forward, scale), out=self._forward[device, k, 1:])
            np.cumsum(np.multiply(times.backward, scale), out=self._backward[device, k, 1:])

    def forward(self, rows: Rows, samples: Wholes) -> Floats:
        """[R, g] seconds for [R, g] samples."""
        return self._look_up(self._forward, rows, samples)

    def backward(self, rows: Rows, samples: Wholes) -> Floats:
        """[R, g] seconds for [R, g] samples."""
        return self._look_up(self._backward, rows, samples)

    def both(self, rows: Rows, samples: Wholes) -> Floats:
        """[R, g] seconds of forward and backward."""
        return self._look_up(self._both, rows, samples)

    def _look_up(self, sums: Floats, rows: Rows, samples: Wholes) -> Floats:
        place, part = self._knot_of(rows, samples)
        _, knots, cuts = sums.shape
        at, flat = (rows.devices * knots + place) * cuts, sums.reshape(-1)
        first, end = at + rows.first[:, None], at + rows.end[:, None]
        low = flat.take(end) - flat.take(first)
        high = flat.take(end + cuts) - flat.take(first + cuts)  # at the next knot
        seconds: Floats = np.where(samples > 0, low + part * (high - low), 0.0)
        return seconds

    def _knot_of(self, rows: Rows, samples: Wholes) -> tuple[Wholes, Floats]:
        """([R, g] knot at or below each number of samples, part of the way to the next)."""
        place, part = _knot_below(self._knots[0], samples)
        kind = self._kind[rows.devices]
        for number, knots in enumerate(self._knots[1:], 1):
            own = kind == number
            place[own], part[own] = _knot_below(knots, samples[own])
        return place, part


def _knots(sizes: Sequence[int], most: int) -> Floats:
    return np.array([sizes[0] / 2, *sizes, max(most, sizes[-1] + 1)], dtype=np.float64)


def _knot_below(knots: Floats, samples: Wholes) -> tuple[Wholes, Floats]:
    place = np.clip(np.searchsorted(knots, samples, side="right") - 1, 0, len(knots) - 2)
    part = np.clip((samples - knots[place]) / (knots[place + 1] - knots[place]), 0.0, 1.0)
    return place, part


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """The allocations found.

    Attributes:
        samples: [R, g] of every device; 0 everywhere where a row is impossible.
        forward, backward: [R] seconds of the slowest device (Eq. 8); inf where impossible.
    """

    samples: Wholes
    forward: Floats
    backward: Floats


def divide(
    times: SampleTimes, rows: Rows, micro_batch: int, room: Wholes, *, every_device: bool = True
) -> Divided:
    """Algorithm 1 on every row.

    Arguments:
        room: [R, g] samples that each device's memory takes.
        every_device: each takes a sample at least; else those without room take none, as published.
    """
    room = np.clip(room, 0, micro_batch)
    usable = (room > 0).sum(axis=1)
    enough = room.sum(axis=1) >= micro_batch
    enough &= (usable >= 1) & (usable <= micro_batch)
    if every_device:
        enough &= usable == room.shape[1]
    chosen = np.flatnonzero(enough)
    samples = np.zeros_like(room)
    forward, backward = np.full(len(rows), np.inf), np.full(len(rows), np.inf)
    if len(chosen):
        part, limits = rows[chosen], room[chosen]
        found = _balanced(times, part, micro_batch, limits)
        _give_everyone_one(found, limits)
        for block in blocks(micro_batch):
            _offload(times, part, found, limits, block)
        samples[chosen] = found
        forward[chosen] = times.forward(part, found).max(axis=1)
        backward[chosen] = times.backward(part, found).max(axis=1)
    return Divided(samples, forward, backward)


def blocks(micro_batch: int) -> list[int]:
    """The sizes of what is moved, largest first."""
    sizes = [max(1, micro_batch // BLOCKS)]
    while sizes[-1] > MAX_BLOCK:
        sizes.append(sizes[-1] // BLOCKS)
    return list(dict.fromkeys((*sizes, 1)))


def _balanced(times: SampleTimes, rows: Rows, micro_batch: int, room: Wholes) -> Wholes:
    """Phase 1; the paper's parts are not whole, so what rounding leaves is divided again too."""
    whole_batch = np.full_like(rows.devices, micro_batch)
    speed = 1.0 / np.maximum(times.both(rows, whole_batch), INSTANT)
    found = np.zeros_like(room)
    left = np.full(len(rows), micro_batch)
    while left.any():
        weight = np.where(room > found, speed, 0.0)
        total = np.maximum(weight.sum(axis=1, keepdims=True), 1e-300)
        part = weight / total * left[:, None]
        more = np.minimum(np.floor(part + 1e-9).astype(np.int64), room - found)
        if not more.any():  # fewer samples are left than devices with room, in every row
            order = np.argsort(-part, axis=1, kind="stable")
            rank = np.empty_like(order)
            np.put_along_axis(rank, order, np.arange(room.shape[1])[None, :], axis=1)
            more = (rank < left[:, None]).astype(np.int64)
        found += more
        left -= more.sum(axis=1)
    return found


def _give_everyone_one(found: Wholes, room: Wholes) -> None:
    """Move a sample from those who have most to those who have none and room for one."""
    while True:
        without = (found == 0) & (room > 0)
        rows = np.flatnonzero(without.any(axis=1))
        if not len(rows):
            return
        found[rows, np.argmax(found[rows], axis=1)] -= 1
        found[rows, np.argmax(without[rows], axis=1)] += 1


def _offload(times: SampleTimes, rows: Rows, found: Wholes, room: Wholes, block: int) -> None:
    """Phase 2 with blocks of that many samples, in place; every device keeps a sample."""
    active = np.arange(len(rows))
    seconds = times.both(rows, found)
    while len(active):
        here = np.arange(len(active))
        now, mine = seconds[active], found[active]
        slow = np.argmax(now, axis=1)
        free = (room[active] - mine >= block) & (mine > 0)
        fast = np.argmin(np.where(free, now, np.inf), axis=1)
        movable = free[here, fast] & (mine[here, slow] > block)
        mine[here, slow] -= block
        mine[here, fast] += block
        active, mine, now = active[movable], mine[movable], now[movable]
        if not len(active):
            return
        pair = np.stack((slow[movable], fast[movable]), axis=1)  # [rows, 2]
        two = Rows(
            np.take_along_axis(rows.devices[active], pair, axis=1),
            rows.first[active],
            rows.end[active],
        )
        after = now.copy()
        changed = times.both(two, np.take_along_axis(mine, pair, axis=1))
        np.put_along_axis(after, pair, changed, axis=1)
        better = after.max(axis=1) < now.max(axis=1) * (1 - 1e-12)
        active = active[better]
        found[active], seconds[active] = mine[better], after[better]
