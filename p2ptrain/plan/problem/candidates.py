"""What is worth trying where all is too much: micro-batch sizes, cuts, orders of devices.

Asteroid (section 5.7) advises blocks for large models without saying which. Here they are about
equally large in time, weights or activations, and end where little crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import accumulate
from math import lcm

import numpy as np

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import MAX_MICRO_BATCHES, BatchSplit
from p2ptrain.plan.types.request import PlanMode, PlanRequest

MAX_SIZES = 8

MIN_WINDOW = 32
"""Mini-batches over which stages deal: shares of a thirty-second."""

MAX_WINDOW = 256
"""Longer windows take too long to simulate."""


def candidate_splits(cost: CostModel, request: PlanRequest) -> list[BatchSplit]:
    """The fixed size alone, or at most MAX_SIZES sizes, smallest first.

    The least size comes first, since it needs the least memory; then measured ones, because between
    them times are only interpolated; then the largest powers of two and the whole batch.
    Asynchronously the mini-batch itself, in a window over which stages may deal, whatever was asked
    for as a micro-batch.
    """
    batch_size = request.batch_size
    if request.mode is PlanMode.ASYNC:
        window = max(MIN_WINDOW, len(cost.devices))
        return [BatchSplit(window * batch_size, batch_size)]
    if request.micro_batch is not None:
        return [BatchSplit(batch_size, min(request.micro_batch, batch_size)).checked()]
    wanted = [request.min_micro_batch, *_measured(cost, batch_size), *_common(batch_size)]
    splits = [BatchSplit(batch_size, min(size, batch_size)) for size in dict.fromkeys(wanted)]
    usable = [
        split
        for split in splits
        if _min_samples(split) >= request.min_micro_batch
        and split.micro_batches <= MAX_MICRO_BATCHES
    ]
    chosen = usable[:MAX_SIZES] or [BatchSplit(batch_size, batch_size)]
    return sorted(chosen, key=lambda split: split.micro_batch)


def even_window(split: BatchSplit, replicas: Sequence[int]) -> BatchSplit:
    """The window over which stages of so many devices each deal evenly, at least MIN_WINDOW.

    At least NOAM too, so that stages may be as deep as usual. `split` itself where it would be
    longer than MAX_WINDOW.
    """
    even, size = lcm(*replicas), split.micro_batch
    least = max(MIN_WINDOW, sum(replicas))
    window = even * -(-least // even)
    return BatchSplit(window * size, size) if window <= MAX_WINDOW else split


def neighbouring_splits(split: BatchSplit, min_micro_batch: int) -> list[BatchSplit]:
    """A little smaller and larger, nearest first: by samples, and by how many there are.

    Of a number of micro-batches the least size, all alike, and the largest, with the least rest.
    """
    batch_size, size, count = split.batch_size, split.first_samples, split.micro_batches
    sizes = [size - 1, size + 1, size - 2, size + 2]
    counts = [count + more for more in (-1, 1, -2, 2) if count + more > 0]
    sizes += [-(-batch_size // other) for other in (*counts, max(1, count // 2), 2 * count)]
    sizes += [-(-batch_size // (other - 1)) - 1 for other in (count, *counts) if other > 1]
    usable = [size for size in dict.fromkeys(sizes) if 1 <= size <= batch_size]
    splits = [BatchSplit(batch_size, size) for size in usable]
    return [other for other in splits if _min_samples(other) >= min_micro_batch and other != split]


def _min_samples(split: BatchSplit) -> int:
    return min(split.first_samples, split.last_samples)


def _measured(cost: CostModel, batch_size: int) -> list[int]:
    """Sizes in the profile or any device's own times, as many as fit, evenly thinned."""
    tables = [cost.profile.times, *(d.times for d in cost.devices if d.times is not None)]
    sizes = sorted({size for table in tables for size in table.sizes if size <= batch_size})
    if len(sizes) < MAX_SIZES:
        return sizes
    step = (len(sizes) - 1) / (MAX_SIZES - 2)
    return [sizes[round(i * step)] for i in range(MAX_SIZES - 1)]


def _common(batch_size: int) -> list[int]:
    """Powers of two from a quarter of the batch down to 2, then the larger ones."""
    powers = [2**i for i in range(1, batch_size.bit_length())]
    small = [size for size in powers if 4 * size <= batch_size]
    large = [size for size in powers if 4 * size > batch_size]
    return [*_spread(small), *large, batch_size]


def _spread(sizes: list[int]) -> list[int]:
    """From the middle outwards: neither many tiny micro-batches nor few huge ones."""
    middle = len(sizes) // 2
    return sorted(sizes, key=lambda size: abs(sizes.index(size) - middle))


def useful_cuts(
    cost: CostModel, most: int, kept: Sequence[int] = (), *, by_time: bool = False
) -> tuple[int, ...]:
    """At most `most` borders inside the model, ascending, as unit numbers.

    Those `kept`, and in every stretch of about equal size the cut that least crosses.

    Arguments:
        by_time: sizes are times, as of the stages of a plan in force.
    """
    count = cost.unit_count
    if count - 1 <= most:
        return tuple(range(1, count))
    before = list(accumulate(_times(cost) if by_time else _sizes(cost), initial=0.0))
    chosen = set(kept[: (most + 1) // 2])
    stretches = most - len(chosen)
    by_stretch: dict[int, list[int]] = {}
    for cut in range(1, count):
        stretch = min(int(before[cut] / before[-1] * stretches), stretches - 1)
        by_stretch.setdefault(stretch, []).append(cut)
    for cuts in by_stretch.values():
        middle = (cuts[0] + cuts[-1]) / 2
        chosen.add(min(cuts, key=lambda cut: (cost.cut_bytes(cut), abs(cut - middle))))
    return tuple(sorted(chosen))


def _sizes(cost: CostModel) -> list[float]:
    """Every unit's largest share of the model, of time, weights or activations."""
    shares = [
        _times(cost),
        _shares([state.trained for state in cost.unit_states]),
        _shares([unit.activation_bytes for unit in cost.profile.units]),
    ]
    return [max(of_unit) for of_unit in zip(*shares, strict=True)]


def _times(cost: CostModel) -> list[float]:
    largest = cost.profile.times.times[-1]
    both = [a + b for a, b in zip(largest.forward, largest.backward, strict=True)]
    return _shares(both if any(both) else [1.0] * len(both))


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values) or 1.0
    return [value / total for value in values]


def likely_orders(cost: CostModel, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """A few different orders of all `devices`, most promising first; neighbours may share a stage.

    Largest memory first (earlier stages keep more in flight: Asteroid, section 3.4); fastest first,
    with the holder in front (its inputs need not travel); clusters of devices with fast links to
    each other, the holder's first; fastest first and fastest last.
    """
    seconds = {device: whole_seconds(cost, device) for device in devices}
    by_speed = sorted(devices, key=lambda device: seconds[device])
    held_first = sorted(by_speed, key=lambda device: device != cost.holder)
    by_memory = sorted(by_speed, key=lambda device: -cost.devices[device].memory_bytes)
    orders = [by_memory, held_first, _by_cluster(cost, held_first), by_speed, by_speed[::-1]]
    return list(dict.fromkeys(tuple(order) for order in orders))


def _by_cluster(cost: CostModel, devices: Sequence[int]) -> list[int]:
    """`devices` in clusters: from the first always on to the one with the fastest way there.

    The way to a device is its best link with any already listed, both directions counted, so that
    a cluster is listed whole before a slow link is crossed; ties in the order of `devices`.
    """
    rates = cost.links.rates[np.ix_(devices, devices)]
    slower = np.minimum(rates, rates.T)
    reach, order = slower[0].copy(), [0]
    reach[0] = -np.inf
    for _ in range(len(devices) - 1):
        nearest = int(reach.argmax())
        order.append(nearest)
        reach = np.where(np.isneginf(reach), reach, np.maximum(reach, slower[nearest]))
        reach[nearest] = -np.inf
    return [devices[place] for place in order]


def fastest(cost: CostModel, devices: Iterable[int], most: int) -> list[int]:
    """At most so many of the devices, the fastest first."""
    return nsmallest(most, devices, key=lambda device: (whole_seconds(cost, device), device))


def whole_seconds(cost: CostModel, device: int) -> float:
    """Seconds a sample of the whole model on that device, at the largest size it was measured."""
    table = cost.devices[device].times or cost.profile.times
    largest = table.sizes[-1]
    return sum(cost.stage_seconds(device, 0, cost.unit_count, largest)) / largest
