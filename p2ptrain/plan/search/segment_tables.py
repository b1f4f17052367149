"""What groups of neighbours in an order of the devices cost: the arrays of `segments.py`.

Positions in the order are k = 0..n-1, cuts of the model c = 0..C (c = 0 before the first unit, C
behind the last). An *option* is a group's size and how it divides work; the group at position k
with g devices is the order's [k, k+g). Arrays are indexed [end cut, option, position]; what is
impossible is infinite.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.gradient_sums import ring_bytes, ring_steps
from p2ptrain.plan.types.request import PlanMode

Floats: TypeAlias = NDArray[np.float64]

Wholes: TypeAlias = NDArray[np.int64]

PLENTY_SAMPLES = 1e9
"""Instead of room without end, where nothing is kept for the backward."""

MIN_SECONDS = 1e-9
"""Instead of no time at all, so that speeds are finite."""


@dataclass(frozen=True, slots=True)
class Option:
    """A group's size and how its devices divide work."""

    size: int
    allocation: Allocation = Allocation.SAMPLES

    @property
    def deals(self) -> bool:
        """Whether its devices take whole micro-batches."""
        return self.allocation is Allocation.MICRO_BATCHES


def group_options(
    devices: int, split: BatchSplit, allocations: Collection[Allocation]
) -> tuple[Option, ...]:
    """Single devices, and groups of 2, 3, 4, 6, 8, 12, 16, ... devices that divide work so.

    A group cannot be larger than the samples, or micro-batches, there are to share.
    """
    most = {
        Allocation.SAMPLES: split.first_samples,
        Allocation.MICRO_BATCHES: split.micro_batches,
    }
    sizes = [size for size in _thinned(devices) if size > 1]
    options = [Option(1)]
    for allocation in Allocation:
        if allocation in allocations:
            options += [Option(size, allocation) for size in sizes if size <= most[allocation]]
    return tuple(options)


def _thinned(most: int) -> list[int]:
    """1 to 6, then steps of a third to a half; `most` is the last."""
    sizes = list(range(1, min(most, 6) + 1))
    while sizes[-1] < most:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(min(most, power * 2 if sizes[-1] > power else power * 3 // 2))
    return sizes


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """Groups that begin at one cut; [end cut, option, position] seconds unless said otherwise.

    Attributes:
        latency: one micro-batch, forward and backward.
        work: all of a round's, on its busiest device.
        reduce: its all-reduce.
        trips: how often a round waits for a micro-batch's whole way, as memory keeps no more
            in flight; at least once.
    """

    latency: Floats
    work: Floats
    reduce: Floats
    trips: Floats


class SegmentTables:
    """Costs of all groups along one order of devices, for one batch split.

    Attributes:
        cuts: [C+1] unit numbers.
        ends: [options, n] k + g, clipped to n. `sizes`: [options, 1] g.
        rounds: micro-batches of a round, the smaller last one in proportion.
        carried: [C+1] bytes of a micro-batch that cross each cut; 0 at both ends.
        hops: [options, 1] into how many parts a group divides a micro-batch.
    """

    def __init__(
        self,
        cost: CostModel,
        split: BatchSplit,
        order: Sequence[int],
        cuts: Sequence[int],
        options: Sequence[Option],
    ) -> None:
        self.cost, self.split, self.order = cost, split, list(order)
        self._steady = cost.mode is PlanMode.ASYNC
        self.cuts = np.array(cuts)
        self.options = tuple(options)
        self.count = len(order)
        self.rounds = split.batch_size / split.first_samples
        self.sizes = np.array([[option.size] for option in options])
        self._deals = np.array([[option.deals] for option in options])
        self.hops = np.where(self._deals, 1, self.sizes)
        self._starts = np.arange(self.count)[None, :]
        self.ends = np.minimum(self._starts + self.sizes, self.count)
        self._too_long = self._starts + self.sizes > self.count
        kinds = cost.kinds[self.order]
        changes = np.concatenate(([0], np.cumsum(kinds[1:] != kinds[:-1])))
        self._alike = changes[self.ends - 1] == changes[self._starts]
        bytes_each = [0, *(cost.cut_bytes(cut) for cut in cuts[1:-1]), 0]
        self.carried = np.array(bytes_each, dtype=np.float64) * split.first_samples
        self._prepare_times()
        self._prepare_memory()
        self._prepare_links()

    def stages(self, first: int) -> Stages:
        """All groups whose units begin at cut `first`."""
        speeds = self._speeds(first)
        together = np.maximum(self._windows(speeds), 1e-300)
        room = self._room(first)
        # A group's seconds a piece: the harmonic mean of its devices', which share in proportion.
        latency = np.where(self._holds(room), self.sizes / together, np.inf)
        per_round = np.where(self._deals, self._dealt_rounds, self.rounds)
        summed = (self._summed[first + 1 :] - self._summed[first])[:, None, None]
        work, reduce = latency * per_round, summed * self._reduce_each + self._reduce_latency
        if self._steady:  # gradients are exchanged while others are computed, again and again
            exchanges = self.rounds / np.where(self._deals, self.sizes, 1)
            work, reduce = np.maximum(work, reduce * exchanges), np.zeros_like(reduce)
        return Stages(
            latency=latency,
            work=work,
            reduce=reduce,
            trips=self._trips(room, speeds, together),
        )

    def feed(self) -> tuple[Floats, Floats]:
        """([C, options, n] seconds that feeding occupies the holder's uplink, first arrival).

        For groups that begin at the first unit. Targets go to the last stage, of which only one
        that is the whole pipeline is known here; any other is fed at the holder's fastest rate.
        """
        cost, profile = self.cost, self.cost.profile
        speeds = self._speeds(0)  # [C, kinds, n]
        rates = cost.links.rates[cost.holder, self.order]
        share = self._windows(speeds / rates) / np.maximum(self._windows(speeds), 1e-300)
        each = np.full((share.shape[0], 1, 1), float(profile.input_bytes))
        each[-1] += profile.target_bytes
        away = np.array(self.order) != cost.holder
        latency = cost.links.latencies[cost.holder, self.order] * away
        first = share * each * self.split.first_samples + latency
        occupied = share * each
        if away.any():
            occupied[:-1] += profile.target_bytes / rates[away].max()
        return occupied * self.split.batch_size, first

    @property
    def holders_part(self) -> Floats:
        """[options, n] 1 / size of the groups in which the holder is; 0 of the others."""
        places = np.flatnonzero(np.array(self.order) == self.cost.holder)
        place = int(places[0]) if len(places) else self.count
        inside = (self._starts <= place) & (place < self._starts + self.sizes)
        shares: Floats = inside / self.sizes
        return shares

    def _prepare_times(self) -> None:
        split = self.split
        pieces = [
            split.first_samples if option.deals else -(-split.first_samples // option.size)
            for option in self.options
        ]
        kinds = sorted(set(pieces))
        self._pieces = np.array(kinds)
        self._kind = np.array([[kinds.index(piece)] for piece in pieces])
        # [kinds, n, C+1] seconds of the units before each cut
        self._before = np.stack([self._seconds_before(samples) for samples in kinds])
        # Asynchronously the window is chosen to be even.
        turns = split.micro_batches / self.sizes
        whole = turns if self._steady else np.ceil(turns)
        self._dealt_rounds = whole * (self.rounds / split.micro_batches)

    def _seconds_before(self, samples: int) -> Floats:
        """[n, C+1] forward and backward of that many samples."""
        reference = self.cost.profile.times.at(samples)
        both = np.add(reference.forward, reference.backward)
        rows = []
        for device in self.order:
            if self.cost.devices[device].times is None:
                rows.append(both * self.cost.devices[device].slowdown)
            else:
                own = self.cost.unit_times(device, samples)
                rows.append(np.add(own.forward, own.backward))
        sums = np.cumsum(np.array(rows), axis=1)
        return np.concatenate((np.zeros((self.count, 1)), sums), axis=1)[:, self.cuts]

    def _speeds(self, first: int) -> Floats:
        """[C-first, kinds, n] pieces a second of each device alone."""
        seconds = self._before[:, :, first + 1 :] - self._before[:, :, first : first + 1]
        return 1.0 / np.maximum(seconds.transpose(2, 0, 1), MIN_SECONDS)

    def _windows(self, values: Floats) -> Floats:
        """[.., options, n] sums over each group of [.., kinds, n]."""
        sums = _leading_zero(np.cumsum(values, axis=2))
        return sums[:, self._kind, self.ends] - sums[:, self._kind, self._starts]

    def _prepare_memory(self) -> None:
        cost, units = self.cost, self.cost.profile.units
        self._trained = self._sums([state.trained for state in cost.unit_states])
        self._summed = self._sums([state.summed_bytes for state in cost.unit_states])
        self._activations = self._sums([unit.activation_bytes for unit in units])
        devices = [cost.devices[device] for device in self.order]
        self._memory = np.array([float(device.memory_bytes) for device in devices])

    def _sums(self, per_unit: Sequence[float]) -> Floats:
        sums: Floats = np.concatenate(([0.0], np.cumsum(np.array(per_unit, dtype=np.float64))))
        at_cuts: Floats = sums[self.cuts]
        return at_cuts

    def _room(self, first: int) -> Floats:
        """[C-first, kinds, n] samples that each device can have in flight.

        Those who take whole micro-batches keep whole ones.
        """
        trained = (self._trained[first + 1 :] - self._trained[first])[:, None]
        activations = (self._activations[first + 1 :] - self._activations[first])[:, None]
        left = self._memory - trained
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(activations > 0, np.floor(left / activations), PLENTY_SAMPLES)
        room = np.where(left < 0, 0, np.minimum(room, PLENTY_SAMPLES))
        pieces = np.where(self._pieces == self.split.first_samples, self._pieces, 1)[:, None]
        whole: Floats = room[:, None, :] // pieces * pieces
        return whole

    def _holds(self, room: Floats) -> NDArray[np.bool_]:
        """[C-first, options, n] whether every device has room, and all for one micro-batch.

        And whether they may have one stage.
        """
        samples = self.split.first_samples
        none = self._windows((room < 1).astype(np.float64))
        enough = self._windows(np.minimum(room, samples)) >= samples
        holds: NDArray[np.bool_] = (none == 0) & enough & ~self._too_long & self._alike
        return holds

    def _trips(self, room: Floats, speeds: Floats, together: Floats) -> Floats:
        """[C-first, options, n] rounds over the depth at which some device of the group is full."""
        least = _min_in_windows(room / speeds, self._kind, self.sizes)
        depth = least * together / self.split.first_samples
        depth = np.where(depth >= 1, np.floor(depth), np.maximum(depth, 1e-9))
        return np.maximum(np.ceil(self.rounds / np.maximum(depth, 1)), self.rounds / depth)

    def _prepare_links(self) -> None:
        rates = self.cost.links.rates[np.ix_(self.order, self.order)]
        latencies = self.cost.links.latencies[np.ix_(self.order, self.order)]
        largest = max(option.size for option in self.options)
        slowest, longest = _worst_in_windows(rates, latencies, largest)
        at = self.sizes - 1, np.broadcast_to(self._starts, self.ends.shape)
        each = np.array([[ring_bytes(option.size, 1.0)] for option in self.options])
        steps = np.array([[ring_steps(option.size)] for option in self.options])
        self._reduce_each, self._reduce_latency = each / slowest[at], steps * longest[at]
        self.rates, self.latencies = rates, latencies


def _leading_zero(sums: Floats) -> Floats:
    """Sums before each position, and after the last, along the last axis."""
    zero = np.zeros((*sums.shape[:-1], 1))
    return np.concatenate((zero, sums), axis=-1)


def _min_in_windows(values: Floats, kind: Wholes, sizes: Wholes) -> Floats:
    """[.., options, n] least of each group of [.., kinds, n]; groups end with the order.

    A window is the union of two shorter ones whose length is a power of two.
    """
    largest = int(sizes.max())
    levels = [values]  # level l: least of the 2^l values from each position on
    while 2 << (len(levels) - 1) <= largest:
        shift = 1 << (len(levels) - 1)
        later = np.concatenate((levels[-1][..., shift:], levels[-1][..., -shift:]), axis=-1)
        levels.append(np.minimum(levels[-1], later))
    count = values.shape[-1]
    least = np.empty((values.shape[0], len(sizes), count))
    for option, (size,) in enumerate(sizes):
        level = int(size).bit_length() - 1
        chosen = levels[level][:, kind[option, 0]]
        second = np.minimum(np.arange(count) + size - (1 << level), count - 1)
        least[:, option] = np.minimum(chosen, chosen[:, second])
    return least


def _worst_in_windows(rates: Floats, latencies: Floats, largest: int) -> tuple[Floats, Floats]:
    """[size-1, position] least rate and largest latency between any two of `size` neighbours.

    A window's pairs are those of the two windows one shorter, and the pair of its ends.
    """
    count = len(rates)
    rate = np.full((largest, count), np.inf)
    latency = np.zeros((largest, count))
    slower, later = np.minimum(rates, rates.T), np.maximum(latencies, latencies.T)
    for more in range(1, largest):
        size = count - more
        ends = np.minimum(rate[more - 1, :size], rate[more - 1, 1 : size + 1])
        rate[more, :size] = np.minimum(ends, slower.diagonal(more))
        ends = np.maximum(latency[more - 1, :size], latency[more - 1, 1 : size + 1])
        latency[more, :size] = np.maximum(ends, later.diagonal(more))
    return rate, latency
