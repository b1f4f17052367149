"""What a group of devices would do with units [i, j), for all groups and ranges at once.

The search over structures looks at thousands of stages; these tables hold, for every *kind* of
group (which devices, what their shares count), the seconds of a stage whose shares are balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.search.exchange import exchange
from p2ptrain.plan.shared.rules import Rules
from p2ptrain.plan.split import BatchSplit

Floats: TypeAlias = NDArray[np.float64]
Wholes: TypeAlias = NDArray[np.int64]

FINE = 32
"""Shares are counted in at most so many equal steps."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Who forms a stage.

    Attributes:
        deals: whole micro-batches, not samples of each.
    """

    devices: tuple[int, ...]
    deals: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class GroupTables:
    """Stages by kind k and range of cuts (i, j); inf or 0 shares where impossible.

    Attributes:
        cuts: [C] the borders considered, 0 and L among them.
        forward, backward: [K, C, C] seconds of a full micro-batch on its slowest device.
        load: [K, C, C] seconds that the busiest device computes in a round.
        reduce: [K, C, C] seconds of the all-reduce.
        depth: [K, C, C] most micro-batches in flight.
        shares: [K, C, C, D] each device's part of the samples of a round.
    """

    cost: CostModel
    split: BatchSplit
    kinds: tuple[Kind, ...]
    cuts: Wholes
    forward: Floats
    backward: Floats
    load: Floats
    reduce: Floats
    depth: Floats
    shares: Floats


def group_tables(
    cost: CostModel, split: BatchSplit, kinds: Sequence[Kind], cuts: Sequence[int], rules: Rules
) -> GroupTables:
    """The tables of `kinds` on all ranges between `cuts`, as far as `rules` allow a stage."""
    ranges = _Ranges(cost, split, np.array(cuts), rules)
    size = len(cuts)
    shape = len(kinds), size, size
    tables = GroupTables(
        cost=cost,
        split=split,
        kinds=tuple(kinds),
        cuts=ranges.cuts,
        forward=np.full(shape, np.inf),
        backward=np.full(shape, np.inf),
        load=np.full(shape, np.inf),
        reduce=np.zeros(shape),
        depth=np.zeros(shape),
        shares=np.zeros((*shape, len(cost.devices))),
    )
    for k, kind in enumerate(kinds):
        if len(kind.devices) == 1:
            _fill_alone(tables, ranges, k)
        else:
            _fill_group(tables, ranges, k)
    return tables


class _Ranges:
    """Per device and number of steps of samples: seconds and memory of units [i, j)."""

    def __init__(self, cost: CostModel, split: BatchSplit, cuts: Wholes, rules: Rules) -> None:
        self.cost, self.split, self.cuts, self.rules = cost, split, cuts, rules
        self.rounds = split.batch_size / split.first_samples
        self.steps = min(FINE, split.first_samples)
        self.sizes = [
            max(1, round(split.first_samples * (step + 1) / self.steps))
            for step in range(self.steps)
        ]
        self.empty = cuts[None, :] <= cuts[:, None]  # [C, C]
        self._times: dict[int, tuple[Floats, Floats]] = {}
        units = cost.profile.units
        self.parameters = self.sums([unit.parameter_bytes for unit in units])
        self._activations = self.sums([unit.activation_bytes for unit in units])
        self.work = self.sums(
            [rules.work.units(u, u + 1, split.first_samples) for u in range(len(units))]
        )

    def sums(self, per_unit: Sequence[float]) -> Floats:
        """[C, C] totals of units [i, j); 0 where the range is empty."""
        totals = np.concatenate(([0.0], np.cumsum(per_unit)))[self.cuts]
        ranged: Floats = np.where(self.empty, 0.0, totals[None, :] - totals[:, None])
        return ranged

    def full(self, device: int) -> tuple[Floats, Floats]:
        """([C, C] forward, backward) of a full micro-batch."""
        times = self.cost.unit_times(device, self.split.first_samples)
        return self.sums(times.forward), self.sums(times.backward)

    def stepwise(self, device: int) -> tuple[Floats, Floats]:
        """([S, C, C] forward, backward) of 1, 2, ... S steps of samples."""
        if device not in self._times:
            times = [self.cost.unit_times(device, size) for size in self.sizes]
            self._times[device] = (
                np.stack([self.sums(entry.forward) for entry in times]),
                np.stack([self.sums(entry.backward) for entry in times]),
            )
        return self._times[device]

    def fitting(self, device: int) -> Floats:
        """[C, C] samples that may be in flight; below 0 where not even the weights fit."""
        held = self.parameters * (2 + self.cost.profile.optimizer_state_ratio)
        left = self.cost.devices[device].memory_bytes - held
        with np.errstate(divide="ignore", invalid="ignore"):
            samples = np.where(self._activations > 0, left / self._activations, np.inf)
        return np.where(left < 0, -1.0, samples)

    def allowed(self, device: int) -> Floats | float:
        """[C, C] part of a round's samples that the device's cap allows, or 1."""
        if device not in self.rules.caps:
            return 1.0
        allowed: Floats = np.minimum(
            self.rules.most_part(device) / np.maximum(self.work, 1e-300), 1.0
        )
        return allowed

    def deepest(self, samples: Floats, each: Floats | float) -> Floats:
        """Micro-batches in flight where each brings `each` samples of the `samples` that fit."""
        split = self.split
        whole = np.floor(samples / each)
        all_fit = samples >= each * self.rounds
        deepest: Floats = np.where(all_fit, split.micro_batches, whole)
        return np.clip(deepest, 0, split.micro_batches)


def _fill_alone(tables: GroupTables, ranges: _Ranges, k: int) -> None:
    device = tables.kinds[k].devices[0]
    forward, backward = ranges.full(device)
    depth = ranges.deepest(ranges.fitting(device), ranges.split.first_samples)
    possible = (depth >= 1) & ~ranges.empty & (ranges.allowed(device) >= 1.0)
    tables.forward[k] = np.where(possible, forward, np.inf)
    tables.backward[k] = np.where(possible, backward, np.inf)
    last = ranges.cost.unit_times(device, ranges.split.last_samples)
    load = (forward + backward) * (ranges.split.micro_batches - 1)
    load += ranges.sums(last.forward) + ranges.sums(last.backward)
    tables.load[k] = np.where(possible, load, np.inf)
    tables.reduce[k] = 0.0
    tables.depth[k] = depth
    tables.shares[k, :, :, device] = 1.0


def _fill_group(tables: GroupTables, ranges: _Ranges, k: int) -> None:
    kind = tables.kinds[k]
    _, latency, rate = _reduce_terms(tables.cost, kind.devices)
    count = len(kind.devices)
    tables.reduce[k] = 2 * (count - 1) * (ranges.parameters / count / rate + latency)
    (_fill_dealing if kind.deals else _fill_dividing)(tables, ranges, k)


def _reduce_terms(cost: CostModel, devices: Sequence[int]) -> tuple[int, float, float]:
    links = [cost.link(a, b) for a in devices for b in devices if a != b]
    latency = max(link.latency_s for link in links)
    return len(devices), latency, min(link.bytes_per_s for link in links)


def _fill_dividing(tables: GroupTables, ranges: _Ranges, k: int) -> None:
    kind = tables.kinds[k]
    stepwise = [ranges.stepwise(device) for device in kind.devices]
    seconds = np.stack([forward + backward for forward, backward in stepwise])  # [g, S, C, C]
    links = _link_seconds(ranges, kind)
    steps = np.array(ranges.sizes)[None, :, None, None]
    seconds = np.maximum(seconds, links[:, None] * steps)
    fitting = np.stack([ranges.fitting(device) for device in kind.devices])  # [g, C, C]
    each = ranges.split.first_samples / ranges.steps
    caps = np.floor(fitting / each + 1e-9)
    caps = _within_caps(ranges, kind, caps, ranges.steps)
    counts = _balanced(seconds, caps, ranges.steps)  # [g, C, C]
    possible = (counts.min(axis=0) >= 1) & ~ranges.empty & (len(counts) <= ranges.steps)
    rows, columns = np.indices(possible.shape)
    at = np.maximum(counts - 1, 0).astype(np.int64)
    both = [
        np.stack([table[at[g], rows, columns] for g, table in enumerate(tables_of_kind)])
        for tables_of_kind in zip(*stepwise, strict=True)
    ]
    tables.forward[k] = np.where(possible, both[0].max(axis=0), np.inf)
    tables.backward[k] = np.where(possible, both[1].max(axis=0), np.inf)
    tables.load[k] = np.where(possible, (both[0] + both[1]).max(axis=0) * ranges.rounds, np.inf)
    depth = ranges.deepest(fitting, np.maximum(counts, 1) * each).min(axis=0)
    tables.depth[k] = np.maximum(depth, possible)  # rounding up steps must not exclude it
    _set_shares(tables, k, counts)


def _fill_dealing(tables: GroupTables, ranges: _Ranges, k: int) -> None:
    kind, split = tables.kinds[k], ranges.split
    steps = min(FINE, split.micro_batches)
    each = ranges.rounds / steps
    full = [ranges.full(device) for device in kind.devices]
    one = np.stack([forward + backward for forward, backward in full])  # [g, C, C]
    links = _link_seconds(ranges, kind) * split.first_samples
    counted = (each * np.arange(1, steps + 1))[None, :, None, None]
    seconds = np.maximum(one, links)[:, None] * counted
    fitting = np.stack([ranges.fitting(device) for device in kind.devices])
    caps = np.where(fitting >= split.first_samples, float(steps), 0.0)
    counts = _balanced(seconds, _within_caps(ranges, kind, caps, steps), steps)
    possible = (counts.min(axis=0) >= 1) & ~ranges.empty & (len(counts) <= steps)
    tables.forward[k] = np.where(possible, np.stack([f for f, _ in full]).min(axis=0), np.inf)
    tables.backward[k] = np.where(possible, np.stack([b for _, b in full]).min(axis=0), np.inf)
    tables.load[k] = np.where(possible, (one * counts).max(axis=0) * each, np.inf)
    held = np.floor(fitting / split.first_samples)
    # Rounded up: turns in step hold one micro-batch more than the mean.
    depth = np.ceil(held * steps / np.maximum(counts, 1)).min(axis=0)
    tables.depth[k] = np.clip(depth, possible, split.micro_batches)
    _set_shares(tables, k, counts)


def _link_seconds(ranges: _Ranges, kind: Kind) -> Floats:
    """[g, C, C] seconds a sample that each device's links are busy at least."""
    cost = ranges.cost
    found = [exchange(cost, kind.devices, device).table(ranges.cuts) for device in kind.devices]
    return np.stack(found)


def _within_caps(ranges: _Ranges, kind: Kind, caps: Floats, steps: int) -> Floats:
    """[g, C, C] steps that memory and the caps on devices allow."""
    if not ranges.rules.caps:
        return caps
    allowed = [np.ceil(ranges.allowed(device) * steps) for device in kind.devices]
    within: Floats = np.minimum(caps, np.stack(np.broadcast_arrays(caps[0], *allowed)[1:]))
    return within


def _balanced(seconds: Floats, caps: Floats, steps: int) -> Floats:
    """[g, C, C] steps of each device so that the slowest is fastest; 0 = none for that device.

    `seconds` is [g, S, C, C], growing along S: the `steps` least entries are the best choice, the
    first step of each device aside, which it needs to be in the group. Ties may give a step too
    many.
    """
    numbers = np.arange(1, steps + 1)[None, :, None, None]
    needed = np.where(numbers == 1, 0.0, seconds)
    limited = np.where(numbers <= caps[:, None], needed, np.inf)
    flat = limited.reshape(-1, *seconds.shape[2:])  # [g·S, C, C]
    limit = np.partition(flat, steps - 1, axis=0)[steps - 1]
    chosen = (limited <= limit) & np.isfinite(limited)
    counts: Floats = chosen.sum(axis=1).astype(np.float64)
    return np.where(np.isfinite(limit), counts, 0.0)


def _set_shares(tables: GroupTables, k: int, counts: Floats) -> None:
    total = np.maximum(counts.sum(axis=0), 1)
    for g, device in enumerate(tables.kinds[k].devices):
        tables.shares[k, :, :, device] = counts[g] / total
