"""The dynamic programme behind the straight pipeline: cuts and devices, last unit first.

PipeDream (SOSP 2019, section 3.1) and FTPipeHD minimise the slowest stage. Here a suffix of the
pipeline has a *round time* instead, from its first input to its last gradient, because with few
micro-batches filling and draining weigh as much as the slowest stage. For a head stage g with units
[i, j) before the suffix R that begins at unit j on device h:

    R'(i) = min over j, h of  max( M·c_g(i,j) ,  c_g(i,j) + hop(j) + max( R(j), M·occupation(j) ) )

with c = forward + backward of one micro-batch and hop(j) = both directions over the link. Where
memory keeps fewer than M micro-batches in flight, the round trips this forces count too. The
result generates candidates; the simulation judges them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import BatchSplit

Floats: TypeAlias = NDArray[np.float64]

Wholes: TypeAlias = NDArray[np.int64]

DevicePlacement: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""(borders, devices) of a draft."""


@dataclass(frozen=True, slots=True, eq=False)
class Suffix:
    """The best ends of a pipeline whose head stage is on `device`, by first unit i.

    Attributes:
        value: [L] float64, round seconds of units i..L-1; inf = impossible.
        latency: [L] float64, seconds of one micro-batch there and back.
        last: [L] float64, seconds of the last stage for a micro-batch.
        followers: what may come next; empty for a last stage.
        follower, cut: [L] int64, which follower was best and the unit it begins at.
    """

    device: int
    value: Floats
    latency: Floats
    last: Floats
    followers: tuple[Suffix, ...]
    follower: Wholes
    cut: Wholes

    def placement(self, first: int = 0) -> DevicePlacement:
        """Borders and devices of the best pipeline of units `first`..L-1."""
        borders, devices = [first], []
        suffix = self
        while True:
            devices.append(suffix.device)
            borders.append(int(suffix.cut[borders[-1]]))
            if not suffix.followers:
                return tuple(borders), tuple(devices)
            suffix = suffix.followers[int(suffix.follower[borders[-2]])]


class Partition:
    """Builds suffixes for one batch split. `evaluations` counts suffixes extended.

    Arguments:
        duplex: count a link's two directions side by side (the optimistic view) or one after the
            other, as they are at a device that sends outputs on and gradients back.
        question: whose caps limit a device's units.
        cuts: where the model may be cut, its ends included; everywhere unless given. The units of
            this module's arrays are then the blocks between two cuts.
    """

    def __init__(
        self,
        cost: CostModel,
        split: BatchSplit,
        *,
        duplex: bool = True,
        question: Question | None = None,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.cost, self.split, self.evaluations = cost, split, 0
        self._question = question
        self._rounds = split.batch_size / split.first_samples
        self._duplex = duplex
        self._stages: dict[int, tuple[Floats, Floats | None]] = {}
        self._cuts: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self.cuts = tuple(range(cost.unit_count + 1) if cuts is None else cuts)
        self._carried = np.array([0.0, *map(cost.cut_bytes, self.cuts[1:-1])])
        self._carried *= split.first_samples
        units = cost.profile.units
        self._held = self._range_sums([state.trained for state in cost.unit_states])
        self._activations = self._range_sums([unit.activation_bytes for unit in units])

    def last(self, device: int) -> Suffix:
        """Pipelines of one stage."""
        seconds, trips = self.stage(device)
        alone = seconds[:, -1]
        value = alone * self._rounds
        if trips is not None:
            value = np.maximum(value, alone * trips[:, -1])
        count = len(alone)
        empty = np.zeros(count, dtype=np.int64)
        return Suffix(device, value, alone, alone, (), empty, np.full(count, count))

    def placement(self, suffix: Suffix) -> DevicePlacement:
        """Borders, in units, and devices of the best pipeline of the whole model."""
        borders, devices = suffix.placement()
        return tuple(self.cuts[border] for border in borders), devices

    def extend(self, device: int, followers: Sequence[Suffix], *, twice: bool = False) -> Suffix:
        """Pipelines with one more stage in front. With `twice`, `device` is also the last stage."""
        self.evaluations += 1
        values = np.stack([self._waited(device, suffix) for suffix in followers])
        follower = np.argmin(values, axis=0)  # [L], by cut j
        columns = np.arange(values.shape[1])
        behind = values[follower, columns]
        latency = np.stack([self._round_trip(device, suffix) for suffix in followers])
        last = np.stack([suffix.last for suffix in followers])[follower, columns]
        return self._choose(
            device, followers, follower, behind, latency[follower, columns], last, twice
        )

    def _choose(
        self,
        device: int,
        followers: Sequence[Suffix],
        follower: Wholes,
        behind: Floats,
        latency: Floats,
        last: Floats,
        twice: bool,
    ) -> Suffix:
        seconds, trips = self.stage(device)
        seconds = seconds[:, :-1]  # [L, L]: the head ends where the follower begins
        work = seconds + last if twice else seconds
        total = np.maximum(work * self._rounds, seconds + behind)
        if trips is not None:
            total = np.maximum(total, (seconds + latency) * trips[:, :-1])
        cut = np.argmin(total, axis=1)  # [L], by first unit i
        rows = np.arange(len(cut))
        return Suffix(
            device=device,
            value=total[rows, cut],
            latency=seconds[rows, cut] + latency[cut],
            last=last[cut],
            followers=tuple(followers),
            follower=follower[cut],
            cut=cut,
        )

    def _waited(self, device: int, suffix: Suffix) -> Floats:
        hop, occupation = self._cut(device, suffix.device)
        return hop + np.maximum(suffix.value, occupation)

    def _round_trip(self, device: int, suffix: Suffix) -> Floats:
        return self._cut(device, suffix.device)[0] + suffix.latency

    def _cut(self, sender: int, receiver: int) -> tuple[Floats, Floats]:
        """([L] seconds there and back at every cut, [L] occupation in a round)."""
        key = sender, receiver
        if key not in self._cuts:
            there, back = self.cost.link(sender, receiver), self.cost.link(receiver, sender)
            if sender == receiver:
                self._cuts[key] = np.zeros_like(self._carried), np.zeros_like(self._carried)
                return self._cuts[key]
            forward, backward = self._carried / there.bytes_per_s, self._carried / back.bytes_per_s
            occupation = np.maximum(forward, backward) if self._duplex else forward + backward
            hop = forward + backward + there.latency_s + back.latency_s
            self._cuts[key] = hop, occupation * self._rounds
        return self._cuts[key]

    def stage(self, device: int) -> tuple[Floats, Floats | None]:
        """([L, L+1] seconds of units [i, j), inf where impossible; round trips forced, or None)."""
        if device not in self._stages:
            self._stages[device] = self._seconds(device), self._forced(device)
        return self._stages[device]

    def seconds(self, device: int) -> Floats:
        """The first of `stage` alone."""
        known = self._stages.get(device)
        return self._seconds(device) if known is None else known[0]

    def _seconds(self, device: int) -> Floats:
        times = self.cost.unit_times(device, self.split.first_samples)
        seconds = self._range_sums(np.add(times.forward, times.backward))
        if self._room(device) < self.split.first_samples:
            seconds[self._depth(device) < 1] = np.inf
        if self._question is not None and device in self._question.caps:
            seconds[self._parts(self._question) > self._question.most_part(device)] = np.inf
        return seconds

    def _forced(self, device: int) -> Floats | None:
        if self._room(device) >= self.split.batch_size:
            return None
        depth = self._depth(device)
        if (depth >= self.split.micro_batches).all():
            return None
        forced: Floats = np.ceil(self._rounds / np.maximum(depth, 1))
        return forced

    def _room(self, device: int) -> int:
        """Samples that it may have in flight in the whole model, and so in any part of it."""
        memory_bytes = self.cost.devices[device].memory_bytes
        return self.cost.samples_that_fit(0, self.cost.unit_count, memory_bytes)

    def _parts(self, question: Question) -> Floats:
        """[L, L+1], part of the round's work that units [i, j) are."""
        samples = self.split.first_samples
        units = range(self.cost.unit_count)
        return self._range_sums([question.work.units(u, u + 1, samples) for u in units])

    def _range_sums(self, per_unit: Sequence[float] | Floats) -> Floats:
        """`range_sums` of what each block between two cuts has together."""
        return range_sums(np.add.reduceat(np.asarray(per_unit, dtype=float), self.cuts[:-1]))

    def _depth(self, device: int) -> Floats:
        """[L, L+1], how many micro-batches may be in flight in units [i, j); 0 = impossible."""
        left = self.cost.devices[device].memory_bytes - self._held
        with np.errstate(divide="ignore", invalid="ignore"):
            samples = np.where(self._activations > 0, left / self._activations, np.inf)
        depth = np.floor(samples / self.split.first_samples)
        depth[samples >= self.split.batch_size] = self.split.micro_batches
        depth[left < 0] = 0  # also of no units, whose bytes are infinite
        return np.minimum(depth, self.split.micro_batches)


def range_sums(per_unit: Floats) -> Floats:
    """[L, L+1] sums over [i, j); inf where the range is empty."""
    sums = np.concatenate(([0.0], np.cumsum(per_unit)))
    totals = sums[None, :] - sums[:-1, None]
    totals[np.arange(len(sums))[None, :] <= np.arange(len(per_unit))[:, None]] = np.inf
    return totals


def every_subset(
    partition: Partition, devices: Sequence[int], tail: Suffix | None = None
) -> Iterator[Suffix]:
    """Best pipelines of every set of `devices` and every head in it: exact for the value above.

    2^(n-1)·n extensions for n devices. With `tail`, every pipeline ends in that suffix, whose
    device is none of `devices`.
    """
    table: dict[int, list[Suffix]] = {} if tail is None else {0: [tail]}
    for members in range(1, 1 << len(devices)):
        heads = []
        for i, device in enumerate(devices):
            if members >> i & 1:
                rest = table.get(members & ~(1 << i))
                heads.append(partition.extend(device, rest) if rest else partition.last(device))
        table[members] = heads
        yield from heads


def in_order(
    partition: Partition, devices: Sequence[int], tail: Suffix | None = None
) -> Iterator[Suffix]:
    """Best pipelines that take some of `devices` in that order, by head: n extensions."""
    behind: list[Suffix] = [] if tail is None else [tail]
    for device in reversed(devices):
        suffixes = [partition.extend(device, behind)] if behind else []
        if tail is None:
            suffixes.append(partition.last(device))
        behind.extend(suffixes)
        yield from suffixes
