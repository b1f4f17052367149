"""The best cuts for many orders of stages at once: the light re-plan's dynamic programme.

The same value as `partition.py` (round seconds of a suffix, filling and draining included), but for
stages whose devices are given and with all orders of one length as one array operation: sixty
orders of eight stages cost about as much as one simulated round. A stage may be a group of devices;
its shares are set by speed on the whole model here and re-balanced for its own units afterwards.

Symbols (shapes): B orders, P stages, C places where a cut may lie (0 and L included), K parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.part import Part, shared_by_speed
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.work import ROUNDING, Work

Floats: TypeAlias = NDArray[np.float64]
Wholes: TypeAlias = NDArray[np.int64]

Devices: TypeAlias = tuple[int, ...]

Order: TypeAlias = tuple[Part, ...]
"""The parts of a pipeline, first stage first."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What one part costs, over cut places [i, j).

    Attributes:
        seconds: [L+1, L+1] of a micro-batch, forward and backward; inf = impossible.
        trips: [L+1, L+1] round trips that memory forces at least.
        reduce: [L+1, L+1] all-reduce seconds.
    """

    seconds: Floats
    trips: Floats
    reduce: Floats


class Cuts:
    """Answers for one cost model and batch split; keeps each part's tables.

    Arguments:
        caps: by device, the largest part of the round's work it may take.
    """

    def __init__(
        self, cost: CostModel, split: BatchSplit, caps: dict[int, float], *, private: bool
    ) -> None:
        self.cost, self.split, self._caps, self._private = cost, split, caps, private
        self.rounds = split.batch_size / split.first_samples
        units = cost.profile.units
        self._parameters = _ranges([unit.parameter_bytes for unit in units])
        self._activations = _ranges([unit.activation_bytes for unit in units])
        self._carried = np.array([0.0, *(unit.output_bytes for unit in units)])
        self._carried *= split.first_samples
        work = Work(cost.profile)
        parts = [work.units(i, i + 1, split.first_samples) for i in range(len(units))]
        self._work = _ranges(parts)
        self._tables: dict[Part, Tables] = {}
        self._hops: dict[tuple[Devices, Devices], tuple[float, float, float]] = {}

    def tables(self, part: Part) -> Tables:
        """What that part costs."""
        if part not in self._tables:
            self._tables[part] = self._build(part)
        return self._tables[part]

    def _build(self, part: Part) -> Tables:
        """The slowest member counts, as does the one with the least memory."""
        cost, split = self.cost, self.split
        group = shared_by_speed(cost, split, part)
        shape = self._parameters.shape
        if group is None:
            never = np.full(shape, np.inf)
            return Tables(never, np.ones(shape), np.zeros(shape))
        seconds, trips, reduce = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for place, device in enumerate(group.devices):
            pieces = [n for n in group.pieces(split, place) if n]
            samples = max(pieces, default=1)
            dealt = sum(pieces) / split.batch_size if group.deals else 1.0
            own = _ranges(np.add(*_both(cost, device, samples))) * dealt
            depth = self._depth(device, max(1.0, samples * dealt))
            own[depth < 1] = np.inf
            cap = self._caps.get(device)
            if cap is not None:
                share = sum(pieces) / split.batch_size
                own[self._work * share > cap + ROUNDING] = np.inf
            seconds = np.maximum(seconds, own)
            trips = np.maximum(trips, np.ceil(self.rounds / np.maximum(depth, 1)))
        if len(group.devices) > 1:
            fixed = cost.all_reduce_seconds(group.devices, 0, 0)
            whole = cost.all_reduce_seconds(group.devices, 0, cost.unit_count) - fixed
            total = max(1.0, self._parameters[0, -1])
            reduce = fixed + whole * self._parameters / total
        seconds[~np.triu(np.ones(shape, dtype=bool), 1)] = np.inf
        return Tables(seconds, trips, reduce)

    def _depth(self, device: int, samples: float) -> Floats:
        """[L+1, L+1], how many micro-batches may be in flight; 0 = impossible."""
        held = self._parameters * (2 + self.cost.profile.optimizer_state_ratio)
        left = self.cost.devices[device].memory_bytes - held
        each = np.maximum(self._activations * samples, 1e-9)
        depth = np.floor(np.maximum(left, -1.0) / each)
        whole = left >= self._activations * samples * self.rounds
        depth = np.where(whole, self.split.micro_batches, depth)
        return np.minimum(depth, self.split.micro_batches)

    def solve(
        self, orders: Sequence[Order], places: Sequence[int], *, duplex: bool = True
    ) -> tuple[Floats, Wholes]:
        """The best borders of orders of the same length.

        Arguments:
            places: where cuts may lie, ascending, 0 and L among them.
            duplex: a device's outputs and gradients travel side by side, or one after the other.

        Returns:
            [B] round seconds by value (inf = impossible), [B, P+1] borders.
        """
        return _Batch(self, orders, places, duplex=duplex).solve()

    def hop(self, sender: Part, receiver: Part) -> tuple[float, float, float]:
        """(seconds per carried byte there, back, latency of both) between two stages."""
        pair = sender.devices, receiver.devices
        if pair not in self._hops:
            there, delay = self._one_way(*pair)
            back, delay_back = self._one_way(receiver.devices, sender.devices)
            self._hops[pair] = there, back, delay + delay_back
        return self._hops[pair]

    def _one_way(self, senders: Devices, receivers: Devices) -> tuple[float, float]:
        """Each sender's interface carries its part, to all receivers in turn."""
        links = [self.cost.link(a, b) for a in senders for b in receivers if a != b]
        if not links:
            return 0.0, 0.0
        mean = sum(1 / link.bytes_per_s for link in links) / len(links)
        return mean / min(len(senders), len(receivers)), max(link.latency_s for link in links)

    def feed(self, part: Part, each: int) -> tuple[float, float]:
        """(occupation, latency) in seconds of one micro-batch that the holder sends to a part."""
        links = [self.cost.link(self.cost.holder, d) for d in part.devices if d != self.cost.holder]
        if not links:
            return 0.0, 0.0
        mean = sum(1 / link.bytes_per_s for link in links) / len(part.devices)
        return mean * each * self.split.first_samples, max(link.latency_s for link in links)

    @property
    def carried(self) -> Floats:
        """[L+1] bytes of a micro-batch over each cut."""
        return self._carried

    @property
    def private(self) -> bool:
        """Whether the first and the last stage are the same device's."""
        return self._private


class _Batch:
    """One run of the dynamic programme."""

    def __init__(
        self, cuts: Cuts, orders: Sequence[Order], places: Sequence[int], *, duplex: bool
    ) -> None:
        self.cuts, self.orders, self.duplex = cuts, orders, duplex
        self.places = np.array(places, dtype=np.int64)
        self.parts = list(dict.fromkeys(part for order in orders for part in order))
        number = {part: k for k, part in enumerate(self.parts)}
        self.index = np.array([[number[part] for part in order] for order in orders])
        grid = np.ix_(self.places, self.places)
        tables = [cuts.tables(part) for part in self.parts]
        self.seconds = np.stack([table.seconds[grid] for table in tables])  # [K, C, C]
        reduce = np.stack([table.reduce[grid] for table in tables])
        self.busy = self.seconds * cuts.rounds + reduce
        self.trips = np.stack([table.trips[grid] for table in tables])
        self.forced = bool((self.trips[np.isfinite(self.seconds)] > 1).any())
        self.carried = cuts.carried[self.places]  # [C]

    def solve(self) -> tuple[Floats, Wholes]:
        count, stages = self.index.shape
        rounds, rows = self.cuts.rounds, np.arange(count)[:, None]
        columns = np.arange(len(self.places))
        k = self.index[:, -1]
        last = self.seconds[k, :, -1]  # [B, C]
        value = np.maximum(self.busy[k, :, -1], last * self.trips[k, :, -1])
        latency, chosen = last, []
        for p in range(stages - 2, -1, -1):
            k = self.index[:, p]
            hop, occupation = self._hops(p)
            seconds = self.seconds[k]  # [B, C, C], by first unit and cut
            total = seconds + (hop + np.maximum(value, occupation))[:, None, :]
            busy = self.busy[k]
            if self.cuts.private and p == 0:
                busy += last[:, None, :] * rounds
            np.maximum(total, busy, out=total)
            behind = hop + latency
            if self.forced:  # else no chain there and back is longer than the value above
                np.maximum(total, (seconds + behind[:, None, :]) * self.trips[k], out=total)
            cut = total.argmin(axis=2)  # [B, C]
            chosen.append(cut)
            value = total[rows, columns, cut]
            latency = seconds[rows, columns, cut] + behind[rows, cut]
            last = last[rows, cut]
        return self._fed(value[:, 0]), self._borders(chosen[::-1])

    def _hops(self, p: int) -> tuple[Floats, Floats]:
        """([B, C] seconds there and back at every cut, [B, C] occupation in a round)."""
        pairs = [self.cuts.hop(order[p], order[p + 1]) for order in self.orders]
        there, back, delay = np.array(pairs).T[:, :, None]
        both = there + back
        busy = np.maximum(there, back) if self.duplex else both
        return both * self.carried + delay, busy * self.carried * self.cuts.rounds

    def _fed(self, value: Floats) -> Floats:
        """With the holder's inputs and targets: one uplink, two pieces under way at a time."""
        cuts, sizes = self.cuts, self.cuts.cost.profile
        fed = []
        for order in self.orders:
            busy, delay = cuts.feed(order[0], sizes.input_bytes)
            targets, _ = cuts.feed(order[-1], sizes.target_bytes)
            turn = max(busy + targets, (busy + delay) / 2)
            fed.append((busy + delay, turn * cuts.rounds))
        first, whole = np.array(fed).T
        fed_value: Floats = np.maximum(first + value, whole)
        return fed_value

    def _borders(self, chosen: Sequence[Wholes]) -> Wholes:
        count = len(self.orders)
        rows, place = np.arange(count), np.zeros(count, dtype=np.int64)
        borders = [place]
        for cut in chosen:
            place = cut[rows, place]
            borders.append(place)
        borders.append(np.full(count, len(self.places) - 1))
        found: Wholes = self.places[np.stack(borders, axis=1)]
        return found


def _both(cost: CostModel, device: int, samples: int) -> tuple[Floats, Floats]:
    times = cost.unit_times(device, samples)
    return np.array(times.forward), np.array(times.backward)


def _ranges(per_unit: Sequence[float] | Floats) -> Floats:
    """[L+1, L+1] sums over [i, j); 0 or below where the range is empty."""
    sums = np.concatenate(([0.0], np.cumsum(per_unit)))
    return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)
