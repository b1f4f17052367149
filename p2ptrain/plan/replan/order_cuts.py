"""The best cuts for many orders of stages at once: the light re-plan's dynamic programme.

The same value as `partition.py` (round seconds of a suffix, filling and draining included), but for
stages whose devices are given and with all orders of one length as one array operation: sixty
orders of eight stages cost about as much as one simulated round. A stage may be a group of devices;
its shares are set by speed on the whole model here and re-balanced for its own units afterwards.

Symbols (shapes): B orders, P stages, C places where a cut may lie (0 and L included), K parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost.check_plan import ROUNDING, WorkloadShare
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup, UnplacedGroup, alone
from p2ptrain.plan.types.allocation import BatchSplit

Floats: TypeAlias = NDArray[np.float64]

Singles: TypeAlias = NDArray[np.float32]

Wholes: TypeAlias = NDArray[np.int64]

Devices: TypeAlias = tuple[int, ...]

Order: TypeAlias = tuple[UnplacedGroup, ...]
"""The parts of a pipeline, first stage first."""


@dataclass(frozen=True, slots=True, eq=False)
class CutTables:
    """What one part costs, over cut places [i, j).

    Attributes:
        seconds: [L+1, L+1], of a micro-batch, forward and backward; inf = impossible.
        trips: [L+1, L+1] round trips that memory forces at least.
        reduce: [L+1, L+1] all-reduce seconds.
    """

    seconds: Floats
    trips: Floats
    reduce: Floats


class OrderCuts:
    """Answers for one cost model and batch split; keeps each part's tables.

    Arguments:
        caps: by device, the largest part of the round's work it may take.
    """

    def __init__(
        self,
        cost: CostModel,
        split: BatchSplit,
        caps: dict[int, float],
        *,
        private: bool,
    ) -> None:
        self.cost, self.split, self._caps, self._private = cost, split, caps, private
        self.rounds = split.batch_size / split.first_samples
        units = cost.profile.units
        self._trained = self._ranges([state.trained for state in cost.unit_states])
        self._summed = self._ranges([state.summed_bytes for state in cost.unit_states])
        self._activations = self._ranges([unit.activation_bytes for unit in units])
        self._carried = np.array([0.0, *(unit.output_bytes for unit in units)])
        self._carried *= split.first_samples
        work = WorkloadShare(cost.profile)
        parts = [work.units(i, i + 1, split.first_samples) for i in range(len(units))]
        self._work = self._ranges(parts)
        shape = self._summed.shape
        self._never = np.where(np.triu(np.ones(shape, dtype=bool), 1), 0.0, np.inf)  # empty ranges
        self._tables: dict[UnplacedGroup, CutTables] = {}
        self._alone: dict[tuple[int, int], Floats] = {}
        self._hops: dict[tuple[Devices, Devices], tuple[float, float, float]] = {}

    def tables(self, part: UnplacedGroup) -> CutTables:
        """What that part costs."""
        if part not in self._tables:
            self._tables[part] = self._build(part)
        return self._tables[part]

    def _build(self, part: UnplacedGroup) -> CutTables:
        """The slowest member counts, as does the one with the least memory."""
        cost, split = self.cost, self.split
        group = _shared_by_speed(cost, split, part)
        shape = self._summed.shape
        if group is None:
            never = np.full(shape, np.inf)
            return CutTables(never, np.ones(shape), np.zeros(shape))
        seconds, trips, reduce = self._never, np.ones(shape), np.zeros(shape)
        for place, device in enumerate(group.devices):
            samples = max(group.piece_counts(split, place), default=1)
            taken = group.round_samples(split, place) / split.batch_size
            dealt = taken if group.deals else 1.0
            own = self._seconds(device, samples) * dealt
            depth = self._depth(device, max(1.0, samples * dealt))
            if depth is not None:
                own[depth < 1] = np.inf
                trips = np.maximum(trips, np.ceil(self.rounds / np.maximum(depth, 1)))
            cap = self._caps.get(device)
            if cap is not None:
                own[self._work * taken > cap + ROUNDING] = np.inf
            seconds = np.maximum(seconds, own)
        if len(group.devices) > 1:
            fixed = cost.all_reduce_seconds(group.devices, 0, 0)
            whole = cost.all_reduce_seconds(group.devices, 0, cost.unit_count) - fixed
            total = max(1.0, self._summed[0, -1])
            reduce = fixed + whole * self._summed / total
        return CutTables(seconds, trips, reduce)

    def _seconds(self, device: int, samples: int) -> Floats:
        """[L+1, L+1] forward and backward of a micro-batch on one device."""
        key = device, samples
        if key not in self._alone:
            times = self.cost.unit_times(device, samples)
            self._alone[key] = self._ranges(np.add(times.forward, times.backward))
        return self._alone[key]

    def _depth(self, device: int, samples: float) -> Floats | None:
        """[L+1, L+1], how many micro-batches may be in flight; 0 = impossible; None = all."""
        most = math.ceil(samples * self.rounds)
        if self.cost.peak_bytes(0, self.cost.unit_count, most) <= (
            self.cost.devices[device].memory_bytes
        ):
            return None
        left = self.cost.devices[device].memory_bytes - self._trained
        each = np.maximum(self._activations * samples, 1e-9)
        depth = np.floor(np.maximum(left, -1.0) / each)
        whole = left >= self._activations * samples * self.rounds
        depth = np.where(whole, self.split.micro_batches, depth)
        return np.minimum(depth, self.split.micro_batches)

    def solve(
        self,
        orders: Sequence[Order],
        places: Sequence[int],
        duplex: Sequence[bool] | None = None,
        last_weights: Sequence[float] | None = None,
    ) -> tuple[Singles, Wholes]:
        """The best borders of orders of the same length.

        Arguments:
            places: where cuts may lie, ascending, 0 and L among them.
            duplex: for each order, whether a device's outputs and gradients travel side by side
                (default) or one after the other.
            last_weights: for each order, what its last stage's time counts for while it is cut.
                In a private plan its device has the first stage too, and must leave time for it.

        Returns:
            [B] round seconds by value (inf = impossible), [B, P+1] borders.
        """
        flags = np.array(duplex if duplex is not None else [True] * len(orders))
        batch = _CutProgramme(self, orders, places, flags)
        if last_weights is not None:
            batch.last_weights = np.array(last_weights, dtype=np.float32)
        return batch.solve()

    def hop(self, sender: UnplacedGroup, receiver: UnplacedGroup) -> tuple[float, float, float]:
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

    def feed(self, part: UnplacedGroup, each: int) -> tuple[float, float]:
        """(occupation, latency) in seconds of one micro-batch that the holder sends to a part."""
        links = [self.cost.link(self.cost.holder, d) for d in part.devices if d != self.cost.holder]
        if not links:
            return 0.0, 0.0
        mean = sum(1 / link.bytes_per_s for link in links) / len(part.devices)
        return mean * each * self.split.first_samples, max(link.latency_s for link in links)

    def _ranges(self, per_unit: Sequence[float] | Floats) -> Floats:
        """[L+1, L+1] sums over [i, j); 0 or below where the range is empty."""
        sums = np.concatenate(([0.0], np.cumsum(per_unit)))
        return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)

    @property
    def carried(self) -> Floats:
        """[L+1] bytes of a micro-batch over each cut."""
        return self._carried

    @property
    def private(self) -> bool:
        """Whether the first and the last stage are the same device's."""
        return self._private


class _CutProgramme:
    """One run of the dynamic programme."""

    def __init__(
        self,
        cuts: OrderCuts,
        orders: Sequence[Order],
        places: Sequence[int],
        duplex: NDArray[np.bool_],
    ) -> None:
        self.cuts = cuts
        self.places = np.array(places, dtype=np.int64)
        self.parts = list(dict.fromkeys(part for order in orders for part in order))
        number = {part: k for k, part in enumerate(self.parts)}
        self.index = np.array([[number[part] for part in order] for order in orders])
        # Tables lie [cut, part, first unit], so that the least is sought along the first axis.
        self.rounds = np.float32(cuts.rounds)
        # Half the precision is enough: drafts are simulated.
        grid = np.ix_(self.places, self.places)
        tables = [cuts.tables(part) for part in self.parts]
        self.seconds = _stacked([table.seconds[grid] for table in tables])  # [C, K, C]
        reduce = _stacked([table.reduce[grid] for table in tables])
        self.busy = self.seconds * self.rounds + reduce
        self.trips = _stacked([table.trips[grid] for table in tables])
        self.forced = bool((self.trips[np.isfinite(self.seconds)] > 1).any())
        self.carried = cuts.carried[self.places].astype(np.float32)  # [C]
        self.duplex = duplex
        self.last_weights: Singles = np.ones(len(orders), dtype=np.float32)
        self.hops = self._all_hops()  # [K, K, 3], as `OrderCuts.hop`

    def _all_hops(self) -> Singles:
        """Of the parts that follow each other in some order."""
        count = len(self.parts)
        pairs = np.unique(self.index[:, :-1] * count + self.index[:, 1:])
        hops = np.zeros((count * count, 3), dtype=np.float32)
        if len(pairs):
            hops[pairs] = [
                self.cuts.hop(*(self.parts[k] for k in divmod(pair, count)))
                for pair in pairs.tolist()
            ]
        return hops.reshape(count, count, 3)

    def solve(self) -> tuple[Singles, Wholes]:
        count, stages = self.index.shape
        rows, columns = np.arange(count)[:, None], np.arange(len(self.places))
        k = self.index[:, -1]
        last = self.seconds[-1, k]  # [B, C] by first unit
        value = np.maximum(self.busy[-1, k], last * self.trips[-1, k])
        value *= self.last_weights[:, None]
        latency, chosen = last, []
        for p in range(stages - 2, -1, -1):
            k = self.index[:, p]
            hop, occupation = self._hops(p)
            behind = hop + latency
            total = self.seconds.take(k, axis=1)  # [C, B, C] by cut and first unit
            around = total + behind.T[:, :, None] if self.forced else None
            total += (hop + np.maximum(value, occupation)).T[:, :, None]
            busy = self.busy.take(k, axis=1)
            if self.cuts.private and p == 0:
                busy += (last * self.rounds).T[:, :, None]
            np.maximum(total, busy, out=total)
            if around is not None:  # else no chain there and back is longer than the value above
                np.maximum(total, around * self.trips.take(k, axis=1), out=total)
            cut = total.argmin(axis=0)  # [B, C]
            chosen.append(cut)
            value = total[cut, rows, columns]
            latency = self.seconds[cut, k[:, None], columns] + behind[rows, cut]
            last = last[rows, cut]
        return self._fed(value[:, 0]), self._borders(chosen[::-1])

    def _hops(self, p: int) -> tuple[Singles, Singles]:
        """([B, C] seconds there and back at every cut, [B, C] occupation in a round)."""
        there, back, delay = self.hops[self.index[:, p], self.index[:, p + 1]].T[:, :, None]
        both = there + back
        busy = np.where(self.duplex[:, None], np.maximum(there, back), both)
        return both * self.carried + delay, busy * self.carried * self.rounds

    def _fed(self, value: Singles) -> Singles:
        """With the holder's inputs and targets: one uplink, two pieces under way at a time."""
        sizes = self.cuts.cost.profile
        inputs = self._feeds(sizes.input_bytes)
        targets = self._feeds(sizes.target_bytes)
        busy, delay = inputs[self.index[:, 0]].T  # [B] each
        turn = np.maximum(busy + targets[self.index[:, -1], 0], (busy + delay) / 2)
        fed: Singles = np.maximum(busy + delay + value, turn * self.rounds)
        return fed

    def _feeds(self, each: int) -> Singles:
        """[K, 2] as `OrderCuts.feed`."""
        return np.array([self.cuts.feed(part, each) for part in self.parts], dtype=np.float32)

    def _borders(self, chosen: Sequence[Wholes]) -> Wholes:
        count = len(self.index)
        rows, place = np.arange(count), np.zeros(count, dtype=np.int64)
        borders = [place]
        for cut in chosen:
            place = cut[rows, place]
            borders.append(place)
        borders.append(np.full(count, len(self.places) - 1))
        found: Wholes = self.places[np.stack(borders, axis=1)]
        return found


def _shared_by_speed(cost: CostModel, split: BatchSplit, part: UnplacedGroup) -> StageGroup | None:
    """Shares in proportion to speed on the whole model, whatever memory says.

    None where there are more devices than there is to share.
    """
    if len(part.devices) == 1:
        return alone(split, part.devices[0])
    total = split.micro_batches if part.deals else split.micro_batch
    if total < len(part.devices):
        return None
    whole = (0, cost.unit_count, split.first_samples)
    speeds = [1 / max(sum(cost.stage_seconds(d, *whole)), 1e-300) for d in part.devices]
    return StageGroup(part.devices, _proportional(speeds, total), part.allocation)


def _proportional(speeds: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole shares of at least 1 that sum to `total`; the largest remainders are rounded up."""
    spare = total - len(speeds)
    exact = [spare * speed / sum(speeds) for speed in speeds]
    shares = [1 + int(part) for part in exact]
    by_rest = sorted(range(len(speeds)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_rest[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def _stacked(tables: Sequence[Floats]) -> Singles:
    """[C, K, C] by cut, part and first unit."""
    return np.stack([table.T for table in tables], axis=1).astype(np.float32)
