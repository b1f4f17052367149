"""How long a mini-batch in tiles takes, event by event, and what it cannot undercut.

In a halo's exchange a device waits for its neighbours only, not for all; devices far from the
slowest one run ahead until the next normalisation, which needs everybody. A device's bytes and
messages are sent when it gets there; what it waits for has arrived a latency after the sender is
through. The filters' sum and the ends are as in `cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.errors import InternalError
from p2ptrain.plan.tiling.cost import Costs, Exchange, GroupCost
from p2ptrain.plan.tiling.problem import TileDevice, TilingProblem
from p2ptrain.tiles.gathering import Gathering


@dataclass(frozen=True, slots=True)
class Simulated:
    """One mini-batch.

    Attributes:
        seconds: from the images to the summed gradients.
        computing: by device: how much of that it computes.
        forward, backward: of `seconds`, through the tiles alone.
    """

    seconds: float
    computing: tuple[float, ...]
    forward: float
    backward: float


def simulate(costs: Costs, borders: Sequence[int]) -> Simulated:
    """Run the groups between `borders` forward and back.

    Raises:
        InternalError: the grid does not carry them.
    """
    groups = []
    for first, end in pairwise(borders):
        group = costs.group(first, end)
        if group is None:
            raise InternalError(f"units {first} to {end - 1} do not fit the grid as one group")
        groups.append(group)
    clocks = [0.0] * len(costs.devices)
    for group in groups:
        clocks = _through(costs, clocks, _forward(group))
    forward = max(clocks)
    for group in reversed(groups):
        clocks = _through(costs, clocks, _backward(group))
    computing = tuple(
        sum(leg[device] for group in groups for leg in (*group.forward, *group.backward))
        for device in range(len(clocks))
    )
    seconds = max(clocks) + costs.fixed_seconds
    return Simulated(seconds, computing, forward, max(clocks) - forward)


def lower_bound(
    problem: TilingProblem,
    devices: Sequence[TileDevice],
    *,
    least: int = 1,
    pieces: int = 1,
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
        part = problem.parameter_bytes / (used * link.bytes_per_s)
        filters = 2 * (used - 1) * (part + link.latency_s)
        work = problem.seconds + (_telling(problem, used) if messages else 0.0)
        bounds.append(pieces * work / sum(speeds[:used]) + filters)
    return min(bounds)


def _telling(problem: TilingProblem, used: int) -> float:
    """Seconds of the reference device for all statistics' messages of `used` devices, both ways."""
    count = sum(operation.statistics for operation in problem.network.operations)
    gathering = Gathering(0, used)
    each = sum(len(gathering.sent(k)) for k in range(gathering.rounds))
    return 2 * count * used * 2 * each * problem.overheads.message_seconds


_Step = Exchange | tuple[float, ...]


def _forward(group: GroupCost) -> Iterable[_Step]:
    yield group.halo
    for k, leg in enumerate(group.forward):
        if k:
            yield group.statistics[k - 1]
        yield leg


def _backward(group: GroupCost) -> Iterable[_Step]:
    for k in reversed(range(len(group.backward))):
        yield group.backward[k]
        if k:
            yield group.statistics[k - 1]
    yield _turned(group.halo)


def _turned(exchange: Exchange) -> Exchange:
    count = len(exchange.waits_for)
    waits_for = tuple(
        frozenset(other for other in range(count) if device in exchange.waits_for[other])
        for device in range(count)
    )
    return Exchange(exchange.received, exchange.sent, exchange.messages, waits_for, exchange.hops)


def _through(costs: Costs, clocks: Sequence[float], steps: Iterable[_Step]) -> list[float]:
    now = list(clocks)
    for step in steps:
        if isinstance(step, Exchange):
            now = _exchanged(costs, now, step)
        else:
            now = [clock + seconds for clock, seconds in zip(now, step, strict=True)]
    return now


def _exchanged(costs: Costs, clocks: Sequence[float], exchange: Exchange) -> list[float]:
    through = [
        clock + costs.device_seconds(exchange, device) for device, clock in enumerate(clocks)
    ]
    latency = exchange.hops * costs.problem.link.latency_s
    return [
        max([own, *(through[other] + latency for other in exchange.waits_for[device])])
        for device, own in enumerate(through)
    ]
