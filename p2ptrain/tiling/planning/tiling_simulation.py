"""How long a mini-batch in tiles takes, event by event, and what it cannot undercut.

In a halo's exchange a device waits for its neighbours only, not for all; devices far from the
slowest one run ahead until the next normalisation, which needs all of them. A device's bytes and
messages are sent when it gets there; what it waits for has arrived a latency after the sender is
through. All begin the backward together: what follows the tiles needs all of their maps. The
filters' all-reduce and the ends are as in `tiling_cost.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.errors import InternalError
from p2ptrain.plan.types.gradient_sums import ring_seconds
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import (
    GroupCost,
    TileDevice,
    TileTraffic,
    TilingProblem,
)


@dataclass(frozen=True, slots=True)
class TileSpan:
    """What keeps a device with tiles busy for a while, from the start of a pass.

    Attributes:
        exchanges: it sends halos and statistics to others; else it computes.
    """

    device: int
    start_seconds: float
    end_seconds: float
    exchanges: bool


@dataclass(frozen=True, slots=True)
class Simulated:
    """One mini-batch.

    Attributes:
        seconds: from the images to the summed gradients.
        computing: by device: how much of that it computes.
        forward, backward: of `seconds`, through the tiles alone.
        forward_spans, backward_spans: of these, all that took time; empty unless recorded.
    """

    seconds: float
    computing: tuple[float, ...]
    forward: float
    backward: float
    forward_spans: tuple[TileSpan, ...] = ()
    backward_spans: tuple[TileSpan, ...] = ()


def simulate_tiles(costs: Costs, borders: Sequence[int], *, record: bool = False) -> Simulated:
    """Run the groups between `borders` forward and back.

    Args:
        record: the spans too; a search, which asks thousands of times, needs none.

    Raises:
        InternalError: the grid does not carry them.
    """
    groups = []
    for first, end in pairwise(borders):
        group = costs.group(first, end)
        if group is None:
            raise InternalError(f"layers {first} to {end - 1} do not fit the grid as one group")
        groups.append(group)
    there: list[TileSpan] | None = [] if record else None
    back: list[TileSpan] | None = [] if record else None
    clocks = [0.0] * len(costs.devices)
    for group in groups:
        clocks = _through(costs, clocks, _forward(group), there)
    forward, clocks = max(clocks), [0.0] * len(costs.devices)
    for group in reversed(groups):
        clocks = _through(costs, clocks, _backward(group), back)
    backward = max(clocks)
    computing = tuple(
        sum(leg[device] for group in groups for leg in (*group.forward, *group.backward))
        for device in range(len(clocks))
    )
    seconds = forward + backward + costs.fixed_seconds
    return Simulated(seconds, computing, forward, backward, tuple(there or ()), tuple(back or ()))


def lower_bound(
    problem: TilingProblem,
    devices: Sequence[TileDevice],
    *,
    least: int = 1,
    pieces: float = 1.0,
    messages: bool = False,
) -> float:
    """What no tiling of all of the problem's units on these devices undercuts.

    Of a mini-batch of `pieces` micro-batches, each as large as the question's.

    All devices compute all the time, nothing twice, no halo is waited for; then the gradients of
    the filters are added up, which each device that takes part must send and receive once, less its
    own part. Fewer devices may be better: taken is the least over the fastest `least`, `least` + 1,
    ... of them.

    Args:
        messages: count, as part of what is computed, the processor time of telling each other
            statistics, each device and each way.
    """
    speeds = sorted((1.0 / device.slowdown for device in devices), reverse=True)
    link = problem.link
    bounds = []
    for used in range(least, len(speeds) + 1):
        summed_bytes = problem.filters.summed_bytes
        filters = ring_seconds(used, summed_bytes, link.bytes_per_s, link.latency_s)
        work = problem.seconds + (_statistics_seconds(problem, used) if messages else 0.0)
        bounds.append(pieces * work / sum(speeds[:used]) + filters)
    return min(bounds)


def _statistics_seconds(problem: TilingProblem, used: int) -> float:
    """Seconds of the reference device for all statistics' messages of `used` devices, both ways."""
    count = sum(operation.statistics for operation in problem.network.operations)
    return 2 * count * used * 2 * (used - 1) * problem.overheads.message_seconds


_Step = TileTraffic | tuple[float, ...]


def _forward(group: GroupCost) -> Iterable[_Step]:
    first, *legs = group.forward
    yield group.halo
    yield first
    for seconds, leg in zip(group.statistics, legs, strict=True):
        yield seconds
        yield leg


def _backward(group: GroupCost) -> Iterable[_Step]:
    for k in reversed(range(len(group.backward))):
        yield group.backward[k]
        if k:
            yield group.statistics[k - 1]
    yield _turned(group.halo)


def _turned(exchange: TileTraffic) -> TileTraffic:
    count = len(exchange.waits_for)
    waits_for = tuple(
        frozenset(other for other in range(count) if device in exchange.waits_for[other])
        for device in range(count)
    )
    return TileTraffic(exchange.received, exchange.sent, exchange.messages, waits_for)


def _through(
    costs: Costs, clocks: Sequence[float], steps: Iterable[_Step], spans: list[TileSpan] | None
) -> list[float]:
    """When each device is through; adds what it does to `spans`, if there are any."""
    now = list(clocks)
    for step in steps:
        match step:
            case TileTraffic():
                through = _after(now, _taken(costs, step))
                _note(spans, now, through, exchanges=True)
                now = _arrived(costs, through, step)
            case _:
                through = _after(now, step)
                _note(spans, now, through, exchanges=False)
                now = through
    return now


def _after(now: Sequence[float], taken: Sequence[float]) -> list[float]:
    return [clock + seconds for clock, seconds in zip(now, taken, strict=True)]


def _note(
    spans: list[TileSpan] | None, start: Sequence[float], end: Sequence[float], *, exchanges: bool
) -> None:
    if spans is not None:
        ends = enumerate(zip(start, end, strict=True))
        spans += [TileSpan(d, first, last, exchanges) for d, (first, last) in ends if last > first]


def _taken(costs: Costs, exchange: TileTraffic) -> tuple[float, ...]:
    return tuple(costs.device_seconds(exchange, device) for device in range(len(costs.devices)))


def _arrived(costs: Costs, through: Sequence[float], exchange: TileTraffic) -> list[float]:
    """When each device has what it waits for, of those that are through with theirs."""
    latency = costs.problem.link.latency_s
    return [
        max([own, *(through[other] + latency for other in exchange.waits_for[device])])
        for device, own in enumerate(through)
    ]
