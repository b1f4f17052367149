"""Dividing whole samples and blocks of a model among devices, for the rivals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

_ROUNDING = 1e-9


def weighted_shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, as near to the weights as that allows.

    Each gets at least one while there is enough: DistributedDataParallel waits for all.

    Raises:
        ValueError: fewer than one each, or a weight that is not above 0.
    """
    if total < len(weights) or min(weights) <= 0:
        raise ValueError(f"{total} cannot be shared by the weights {list(weights)}")
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [max(1, int(part)) for part in exact]
    while sum(shares) != total:
        step = 1 if sum(shares) < total else -1
        movable = [i for i, share in enumerate(shares) if step > 0 or share > 1]
        most = max(movable, key=lambda i: step * (exact[i] - shares[i]))
        shares[most] += step
    return shares


def even_pieces(total: int, largest: int) -> list[int]:
    """`total` in as few pieces of at most `largest` as possible, as equal as possible."""
    count = -(-total // largest)
    return [total // count + (i < total % count) for i in range(count)]


def balanced_cuts(seconds: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Where to cut a chain of blocks so that the slowest device's time is least.

    Of all such cuts those whose stages are most even (least sum of squares): one heavy block sets
    the slowest time, and leaves the other stages free to differ; but blocks' times are not exact,
    and the second slowest stage may prove to be the slowest.

    Args:
        seconds: of each block, on one and the same device.
        speeds: of the devices, in the order of their stages.

    Returns:
        The first block of each stage but the first; every device gets at least one block.

    Raises:
        ValueError: fewer blocks than devices.
    """
    blocks, devices = len(seconds), len(speeds)
    if blocks < devices:
        raise ValueError(f"{blocks} blocks cannot be cut into {devices} stages")
    until = [0.0]
    for block in seconds:
        until.append(until[-1] + block)
    slowest, _ = _best_cuts(until, speeds, max)
    most = slowest * (1 + _ROUNDING)

    def unevenness(so_far: float, stage: float) -> float:
        return so_far + stage * stage if stage <= most else inf

    return _best_cuts(until, speeds, unevenness)[1]


def _best_cuts(
    until: Sequence[float], speeds: Sequence[float], cost: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least cost of all cuts, and these; `cost` adds a stage's seconds to a cost so far."""
    # best[end] = (cost, cuts) of blocks [0, end) on the devices so far
    best: dict[int, tuple[float, list[int]]] = {
        end: (cost(0.0, until[end] / speeds[0]), []) for end in range(1, len(until))
    }
    for speed in speeds[1:]:
        best = {
            end: min(
                (cost(so_far, (until[end] - until[first]) / speed), [*cuts, first])
                for first, (so_far, cuts) in best.items()
                if first < end
            )
            for end in range(min(best) + 1, len(until))
        }
    return best[len(until) - 1]
