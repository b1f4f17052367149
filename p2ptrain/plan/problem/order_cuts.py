"""The best cuts for many orders of stages at once, last unit first.

PipeDream (SOSP 2019, section 3.1) and FTPipeHD minimise the slowest stage. Here a suffix of the
pipeline has a *round time* instead, from its first input to its last gradient, because with few
micro-batches filling and draining weigh as much as the slowest stage. For a head stage g with units
[i, j) before the suffix R that begins at unit j on device h:

    R'(i) = min over j of  max( M·c_g(i,j) ,  c_g(i,j) + hop(j) + max( R(j), M·occupation(j) ) )

with c = forward + backward of one micro-batch and hop(j) = both directions over the link. Where
memory keeps fewer than M micro-batches in flight, the round trips this forces count too. The
result generates candidates; the simulation judges them.

All orders of one length are one array operation: sixty orders of eight stages cost about as much as
one simulated round. A stage may be a group of devices; its shares are set by speed on the whole
model here and re-balanced for its own units afterwards.

Symbols (shapes): B orders, P stages, C places where a cut may lie (0 and L included), K parts, L
units or, where the model may not be cut everywhere, the blocks between two cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost.check_plan import ROUNDING, WorkloadShare
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup, UnplacedGroup, alone
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.request import PlanMode

Floats: TypeAlias = NDArray[np.float64]

Singles: TypeAlias = NDArray[np.float32]

Wholes: TypeAlias = NDArray[np.int64]

Devices: TypeAlias = tuple[int, ...]

Order: TypeAlias = tuple[UnplacedGroup, ...]
"""The parts of a pipeline, first stage first."""


ROOM_WEIGHT = np.float32(0.01)
"""How much the shorter one of computing and feeding counts beside the longer one."""


@dataclass(frozen=True, slots=True, eq=False)
class CutTables:
    """What one part costs, over cut places [i, j).

    Attributes:
        latency: [L+1, L+1], of a micro-batch, forward and backward; inf = impossible.
        seconds: [L+1, L+1] of a round on its busiest device, a micro-batch's part of them.
        trips: [L+1, L+1] round trips that memory forces at least.
        reduce: [L+1, L+1] all-reduce seconds.
    """

    latency: Floats
    seconds: Floats
    trips: Floats
    reduce: Floats


class OrderCuts:
    """Answers for one cost model and batch split; keeps each part's tables.

    Arguments:
        caps: by device, the largest part of the round's work it may take.
        private: the first and the last stage are the same device's.
        cuts: where the model may be cut, its ends included; everywhere unless given.
        more_seconds: of a part, [L+1, L+1] what a micro-batch costs it beside its computing.

    Attributes:
        carried: [L+1] bytes of a micro-batch over each cut.
    """

    def __init__(
        self,
        cost: CostModel,
        split: BatchSplit,
        caps: Mapping[int, float] | None = None,
        *,
        private: bool = False,
        cuts: Sequence[int] | None = None,
        more_seconds: Callable[[UnplacedGroup], Floats] | None = None,
    ) -> None:
        self.cost, self.split, self._caps, self.private = cost, split, caps or {}, private
        self._more_seconds = more_seconds
        self.cuts = range(cost.unit_count + 1) if cuts is None else cuts
        self.rounds = split.batch_size / split.first_samples
        units = cost.profile.units
        self._trained = self._ranges([state.trained for state in cost.unit_states])
        self._summed = self._ranges([state.summed_bytes for state in cost.unit_states])
        self._activations = self._ranges([unit.activation_bytes for unit in units])
        self.carried = np.array([0.0, *(unit.output_bytes for unit in units)])[[*self.cuts]]
        self.carried *= split.first_samples
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
            return CutTables(never, never, np.ones(shape), np.zeros(shape))
        latency = seconds = self._never
        trips, reduce = np.ones(shape), np.zeros(shape)
        for devices, share in self._alike(group):
            taken = share / sum(group.shares)
            samples = split.first_samples if group.deals else min(share, split.first_samples)
            dealt = taken if group.deals else 1.0
            each = self._seconds(max(devices, key=self._slowdown), samples)
            own = each * dealt
            least = min(devices, key=lambda device: cost.devices[device].memory_bytes)
            depth = self._depth(least, max(1.0, samples * dealt))
            if depth is not None:
                own[depth < 1] = np.inf
                trips = np.maximum(trips, np.ceil(self.rounds / np.maximum(depth, 1)))
            cap = self._caps.get(devices[0])
            if cap is not None:
                own[self._work * taken > cap + ROUNDING] = np.inf
            latency, seconds = np.maximum(latency, each), np.maximum(seconds, own)
        if len(group.devices) > 1:
            fixed = cost.all_reduce_seconds(group.devices, 0, 0)
            whole = cost.all_reduce_seconds(group.devices, 0, cost.unit_count) - fixed
            total = max(1.0, self._summed[0, -1])
            reduce = fixed + whole * self._summed / total
        if cost.mode is PlanMode.ASYNC:  # gradients are exchanged while others are computed
            exchanges = len(group.devices) if group.deals else 1
            seconds, reduce = np.maximum(seconds, reduce / exchanges), np.zeros(shape)
        if self._more_seconds is not None:
            seconds = seconds + self._more_seconds(part)
        return CutTables(latency, seconds, trips, reduce)

    def _alike(self, group: StageGroup) -> list[tuple[list[int], int]]:
        """Devices of equal shares that differ in speed and memory alone, with that share."""
        found: dict[tuple[int, int | None], list[int]] = {}
        for device, share in zip(group.devices, group.shares, strict=True):
            special = self.cost.devices[device].times is not None or device in self._caps
            found.setdefault((share, device if special else None), []).append(device)
        return [(devices, share) for (share, _), devices in found.items()]

    def _slowdown(self, device: int) -> float:
        return self.cost.devices[device].slowdown

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
        *,
        fed: bool = True,
    ) -> tuple[Singles, Wholes]:
        """The best borders of orders of the same length.

        Arguments:
            places: numbers of cuts to choose from, ascending, the first and the last border among
                them.
            duplex: for each order, whether a device's outputs and gradients travel side by side
                (default) or one after the other.
            last_weights: for each order, what its last stage's time counts for while it is cut.
                In a private plan its device has the first stage too, and must leave time for it.
            fed: the holder sends inputs and targets.

        Returns:
            [B] round seconds by value (inf = impossible), [B, P+1] borders, as units.
        """
        flags = np.array(duplex if duplex is not None else [True] * len(orders))
        batch = _CutProgramme(self, orders, places, flags)
        if last_weights is not None:
            batch.last_weights = np.array(last_weights, dtype=np.float32)
        return batch.solve(fed=fed)

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
        pairs = np.ix_(senders, receivers)
        seconds = 1 / self.cost.links.rates[pairs]  # 0 from a device to itself
        others = np.count_nonzero(seconds)
        if not others:
            return 0.0, 0.0
        mean = float(seconds.sum()) / others
        latency = float(self.cost.links.latencies[pairs].max())
        return mean / min(len(senders), len(receivers)), latency

    def feed(self, part: UnplacedGroup, each: int) -> tuple[float, float]:
        """(occupation, latency) in seconds of one micro-batch that the holder sends to a part."""
        links = [self.cost.link(self.cost.holder, d) for d in part.devices if d != self.cost.holder]
        if not links:
            return 0.0, 0.0
        mean = sum(1 / link.bytes_per_s for link in links) / len(part.devices)
        return mean * each * self.split.first_samples, max(link.latency_s for link in links)

    def _ranges(self, per_unit: Sequence[float] | Floats) -> Floats:
        """[L+1, L+1] sums over [i, j); 0 or below where the range is empty."""
        sums = np.concatenate(([0.0], np.cumsum(per_unit)))[[*self.cuts]]
        return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)


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
        self.latency = _stacked([table.latency[grid] for table in tables])  # [C, K, C]
        self.seconds = _stacked([table.seconds[grid] for table in tables])
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

    def solve(self, *, fed: bool) -> tuple[Singles, Wholes]:
        count, stages = self.index.shape
        rows, columns = np.arange(count)[:, None], np.arange(len(self.places))
        k = self.index[:, -1]
        last = self.seconds[-1, k]  # [B, C] by first unit
        latency = self.latency[-1, k]
        value = np.maximum(self.busy[-1, k], latency * self.trips[-1, k])
        value *= self.last_weights[:, None]
        chosen = []
        for p in range(stages - 2, -1, -1):
            k = self.index[:, p]
            hop, occupation = self._hops(p)
            behind = hop + latency
            total = self.latency.take(k, axis=1)  # [C, B, C] by cut and first unit
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
            latency = self.latency[cut, k[:, None], columns] + behind[rows, cut]
            last = last[rows, cut]
        round_seconds = self._fed(value[:, 0]) if fed else value[:, 0]
        return round_seconds, self._borders(chosen[::-1])

    def _hops(self, p: int) -> tuple[Singles, Singles]:
        """([B, C] seconds there and back at every cut, [B, C] occupation in a round)."""
        there, back, delay = self.hops[self.index[:, p], self.index[:, p + 1]].T[:, :, None]
        both = there + back
        busy = np.where(self.duplex[:, None], np.maximum(there, back), both)
        return both * self.carried + delay, busy * self.carried * self.rounds

    def _fed(self, value: Singles) -> Singles:
        """With the holder's inputs and targets: one uplink, two pieces under way at a time.

        Of orders whose feeding takes equally long, those that compute faster are better.
        """
        sizes = self.cuts.cost.profile
        inputs = self._feeds(sizes.input_bytes)
        targets = self._feeds(sizes.target_bytes)
        busy, delay = inputs[self.index[:, 0]].T  # [B] each
        turn = np.maximum(busy + targets[self.index[:, -1], 0], (busy + delay) / 2)
        value, feeding = busy + delay + value, turn * self.rounds
        fed: Singles = np.maximum(value, feeding) + ROOM_WEIGHT * np.minimum(value, feeding)
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
        found: Wholes = np.array(self.cuts.cuts)[self.places[np.stack(borders, axis=1)]]
        return found


def _shared_by_speed(cost: CostModel, split: BatchSplit, part: UnplacedGroup) -> StageGroup | None:
    """Shares in proportion to speed on the whole model, whatever memory says.

    None where there are more devices than there is to share, or they may not share a stage.
    """
    if len(part.devices) == 1:
        return alone(split, part.devices[0])
    total = split.micro_batches if part.deals else split.micro_batch
    if total < len(part.devices) or not cost.may_share(part.devices):
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


def range_sums(per_unit: Floats) -> Floats:
    """[L, L+1] sums over [i, j); inf where the range is empty."""
    sums = np.concatenate(([0.0], np.cumsum(per_unit)))
    totals = sums[None, :] - sums[:-1, None]
    totals[np.arange(len(sums))[None, :] <= np.arange(len(per_unit))[:, None]] = np.inf
    return totals
