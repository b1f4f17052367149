"""Which micro-batch sizes are worth considering when the request does not fix one."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

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
    wanted = [request.least_piece, *_measured(cost, batch_size), *_common(batch_size)]
    splits = [BatchSplit(batch_size, min(size, batch_size)) for size in dict.fromkeys(wanted)]
    usable = [
        split
        for split in splits
        if _min_samples(split) >= request.least_piece and split.micro_batches <= MAX_MICRO_BATCHES
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


def neighbouring_splits(split: BatchSplit, least_piece: int) -> list[BatchSplit]:
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
    return [other for other in splits if _min_samples(other) >= least_piece and other != split]


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
