"""Steady asynchronous running: seconds from one mini-batch to the next once the pipeline is full.

PipeDream (SOSP 2019, sections 3.2 and 3.3). What travels is the whole mini-batch; stage p of n does
n-p forwards, then for ever one backward, one forward; no round ends, each backward is followed by
an update. Three stages, every task one tick long, links free:

    stage 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6
    stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5

Replicas of a stage take whole mini-batches in turn, by the draft's window of `micro_batches`
repeated for ever, and depth counts them: K_p = devices from p to the end. They exchange gradients
as published, while others are computed: one all-reduce for as many mini-batches as replicas take
turns. A stage's exchanges follow one another, so that it takes at least max(compute, all-reduce)
per mini-batch. How an exchange slows other transfers is not modelled.

It is timed as a synchronous round of many mini-batches, looked at in its middle. Where a stretch is
still settling and looks too fast to last, the lower bound (`bound.py`) decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.simulation.bound import lower_bound, mini_batches_each
from p2ptrain.plan.simulation.engine import Engine
from p2ptrain.plan.simulation.lanes import build_engine
from p2ptrain.plan.types.allocation import BatchSplit


@dataclass(frozen=True, slots=True)
class ReplicaExchange:
    """The gradients of a stage's mini-batches up to `mini_batch`, summed over its replicas.

    It takes no time where a device is alone: the weights are updated at once.
    """

    stage: int
    mini_batch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Steady:
    """A stretch of steady running.

    Attributes:
        seconds: per mini-batch.
        window: when the measured stretch begins and ends, on the engine's clock.
        engine: has run.
        exchanges: of the whole run, stage by stage.
    """

    seconds: float
    window: tuple[float, float]
    engine: Engine
    exchanges: tuple[ReplicaExchange, ...]

    @property
    def busy_seconds(self) -> dict[int, float]:
        """Computing time by device, per mini-batch."""
        tasks = max(len(lane.seconds) for lane in self.engine.lanes)
        return {device: 2 * busy / tasks for device, busy in self.engine.busy_seconds.items()}


def steady_seconds(cost: CostModel, draft: Draft) -> float:
    """Seconds per mini-batch once the pipeline is full."""
    return run_steadily(cost, draft).seconds


def run_steadily(cost: CostModel, draft: Draft, *, record: bool = False) -> Steady:
    """Simulate the start-up and a stretch of steady running; with `record` for a timeline."""
    first, last, count = _stretch(draft)
    engine = build_engine(cost, endless(draft, count), record=record)
    engine.run()
    # A slow replica's mini-batches end long after later ones of the others: all up to m count.
    done = list(accumulate(_completions(engine, 0, count), max))
    pace = (done[last] - done[first]) / (last - first)
    return Steady(
        seconds=max(pace, lower_bound(cost, draft)),
        window=(done[first], done[last]),
        engine=engine,
        exchanges=tuple(_exchanges(cost, draft, engine, count)) if record else (),
    )


def simulated_tasks(draft: Draft) -> int:
    """What `steady_seconds` costs."""
    return 2 * len(draft.groups) * _stretch(draft)[2]


def _stretch(draft: Draft) -> tuple[int, int, int]:
    """First and last mini-batch between which is measured, and how many are simulated."""
    depth = draft.warmup[0]
    period = draft.split.micro_batches if any(group.deals for group in draft.groups) else 1
    first = _rounded_up(3 * depth + 8, period)
    last = first + _rounded_up(2 * depth + 16, period)
    return first, last, _rounded_up(last + depth + 1, period)


def _rounded_up(count: int, period: int) -> int:
    return -(-count // period) * period


def endless(draft: Draft, count: int) -> Draft:
    """A synchronous round of the first `count` mini-batches, whole windows where stages deal.

    The rule of dealing repeats itself after a window.
    """
    windows = count // draft.split.micro_batches
    size = draft.split.micro_batch
    return replace(
        draft,
        split=BatchSplit(count * size, size),
        groups=tuple(
            replace(group, shares=tuple(windows * share for share in group.shares))
            if group.deals
            else group
            for group in draft.groups
        ),
    )


def _completions(engine: Engine, stage: int, count: int) -> list[float]:
    """When each mini-batch's last backward in a stage has ended."""
    done = [0.0] * count
    for lane in engine.lanes:
        if lane.stage == stage:
            for task, end in zip(lane.tasks, lane.ends, strict=True):
                if task & 1:
                    done[task >> 1] = max(done[task >> 1], end)
    return done


def _exchanges(
    cost: CostModel, draft: Draft, engine: Engine, count: int
) -> Iterator[ReplicaExchange]:
    for p, group in enumerate(draft.groups):
        seconds = cost.all_reduce_seconds(group.devices, *draft.units[p])
        done = _completions(engine, p, count)
        each, end = mini_batches_each(group), 0.0
        for m in range(each - 1, count, each):
            start = max(end, *done[m + 1 - each : m + 1])
            end = start + seconds
            yield ReplicaExchange(p, m, start, end)
