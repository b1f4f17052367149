"""From a draft to the engine's lanes and routes: who computes what, and who sends which samples.

A micro-batch of 6 samples between a stage that divides samples 4 : 2 and one that divides 3 : 3:

    sender    a a a a b b          routes  a -> c  3 samples
    receiver  c c c d d d                  a -> d  1 sample
                                           b -> d  2 samples

A device sends only the samples that the receiver needs, and never waits for others.

All micro-batches but the last are alike, so that a lane's sequences (by task) are repetitions of a
pattern of two; only stages that deal whole micro-batches need a look at each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TypeAlias, TypeVar

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.simulation.engine import FEED, Deferred, Engine, Lane, TransferRoute
from p2ptrain.plan.simulation.overlapped_round import steady_engine
from p2ptrain.plan.types.allocation import deal
from p2ptrain.plan.types.plan import Direction
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.plan.types.schedule import one_f_one_b

T = TypeVar("T")

Range: TypeAlias = tuple[int, int]

Routes: TypeAlias = tuple[TransferRoute, ...]


def build_engine(cost: CostModel, draft: Draft, *, record: bool = False) -> Engine:
    """The engine that times one round of `draft`."""
    if cost.overlap is not None and cost.mode is PlanMode.SYNC:
        return steady_engine(cost, draft, LaneBuilder(cost, draft).lanes(), record)
    reduce_seconds = {
        p: cost.all_reduce_seconds(group.devices, *draft.units[p])
        for p, group in enumerate(draft.groups)
        if len(group.devices) > 1
    }
    return Engine(LaneBuilder(cost, draft).lanes(), reduce_seconds, record)


@lru_cache(maxsize=256)
def stage_tasks(micro_batches: int, warmup: int) -> tuple[int, ...]:
    """A stage's order of work in the engine's numbers: 2m forward, 2m+1 backward."""
    order = one_f_one_b(micro_batches, warmup)
    return tuple(2 * action.micro_batch + (action.kind == "backward") for action in order)


@lru_cache(maxsize=1024)
def _dealt_tasks(shares: tuple[int, ...], warmup: int) -> tuple[tuple[int, ...], ...]:
    """The tasks of each device of a stage that deals whole micro-batches, by place."""
    owners = deal(shares)
    own: list[list[int]] = [[] for _ in shares]
    for task in stage_tasks(len(owners), warmup):
        own[owners[task >> 1]].append(task)
    return tuple(map(tuple, own))


def route(
    cost: CostModel, carries: Direction, ends: tuple[int, int, int, int], cut: int, samples: int
) -> TransferRoute:
    """How so many samples cross before unit `cut`.

    Args:
        ends: lanes of sender and receiver, their devices.
    """
    leaves, arrives, sender, receiver = ends
    link = cost.link(sender, receiver)
    seconds, latency_s = samples * cost.cut_bytes(cut) / link.bytes_per_s, link.latency_s
    latency_s -= samples * cost.streamed_seconds(cut, sender, receiver)
    ways = cost.interfaces(sender, receiver)
    return TransferRoute(carries, leaves, arrives, *ways, seconds, latency_s)


@dataclass(slots=True, eq=False)
class LanePart:
    """What one device of a stage takes: its samples of a full and of the last micro-batch.

    `owners` is None where all devices of the stage divide every micro-batch, else the place of the
    device that takes each.
    """

    lane: int
    stage: int
    device: int
    full: Range
    last: Range
    tasks: tuple[int, ...]
    owners: tuple[int, ...] | None = None


class LaneBuilder:
    """Builds the lanes of one draft; what is other where the first stage is tiled is overridden."""

    def __init__(self, cost: CostModel, draft: Draft) -> None:
        self.cost, self.draft, self.split = cost, draft, draft.split
        self.count = draft.split.micro_batches
        self.is_ragged = draft.split.first_samples != draft.split.last_samples
        self.units = draft.units
        self.stages: list[list[LanePart]] = []
        number = 0
        for p in range(len(draft.groups)):
            self.stages.append(self._parts(p, number))
            number += len(self.stages[-1])

    def lanes(self) -> list[Lane]:
        """All lanes, earlier stages first, in a stage in the order of its devices."""
        return [self._lane(part) for parts in self.stages for part in parts]

    def _parts(self, p: int, number: int) -> list[LanePart]:
        group, split = self.draft.groups[p], self.split
        tasks = stage_tasks(self.count, self.draft.warmup[p])
        full, last = group.ranges(split.first_samples), group.ranges(split.last_samples)
        if group.deals:
            owners, dealt = deal(group.shares), _dealt_tasks(group.shares, self.draft.warmup[p])
            return [
                LanePart(number + i, p, device, full[i], last[i], dealt[i], owners)
                for i, device in enumerate(group.devices)
            ]
        return [
            LanePart(number + i, p, device, full[i], last[i], own)
            for i, device in enumerate(group.devices)
            for own in [tasks if size_of(last[i]) else self._but_last(tasks)]
        ]

    def _but_last(self, tasks: Sequence[int]) -> tuple[int, ...]:
        return tuple(task for task in tasks if task >> 1 != self.count - 1)

    def _lane(self, part: LanePart) -> Lane:
        before = self.stages[part.stage - 1] if part.stage > 0 else []
        after = self.stages[part.stage + 1] if part.stage + 1 < len(self.stages) else []
        feed = self.feed(part)
        routes: list[Routes] = [()] * (2 * self.count)
        if after:
            routes[0::2] = self._results("output", part, after)
        if before:
            routes[1::2] = self._results("gradient", part, before)
        missing = self._missing(part, before, after, fed=feed is not None)
        deferred = self._deferred(part, missing) if self.draft.splits(part.stage) else None
        return Lane(
            number=part.lane,
            stage=part.stage,
            device=part.device,
            tasks=part.tasks,
            seconds=self.by_task(self.seconds(part, part.full), self.seconds(part, part.last)),
            missing=missing,
            routes=routes,
            feed=feed,
            deferred=deferred,
        )

    def _deferred(self, part: LanePart, missing: list[int]) -> Deferred:
        """Its weight gradients; forwards that would leave too many pending miss one more input."""
        held, own = self.draft.held[part.stage], [task for task in part.tasks if not task & 1]
        awaited: dict[int, list[int]] = {}
        for task in own:
            oldest = bisect_right(own, task - 2 * held) - 1
            if oldest >= 0:
                awaited.setdefault(own[oldest] >> 1, []).append(task)
                missing[task] += 1
        full, last = (
            self.cost.split_seconds(part.device, *self.units[part.stage], size_of(samples))[2]
            if size_of(samples)
            else 0.0
            for samples in (part.full, part.last)
        )
        each = [full] * (self.count - 1) + [last]
        seconds = [0.0] * self.count
        for task in own:
            seconds[task >> 1] = each[task >> 1]
        return Deferred(seconds, awaited)

    def _missing(
        self, part: LanePart, before: Sequence[LanePart], after: Sequence[LanePart], *, fed: bool
    ) -> list[int]:
        """How many inputs each task waits for."""
        full_before, last_before = _senders(part, before)
        full_after, last_after = _senders(part, after)
        return self.by_task((full_before + fed, full_after), (last_before + fed, last_after))

    def by_task(self, full: tuple[T, T], last: tuple[T, T]) -> list[T]:
        """(forward, backward) of a full micro-batch and of the last one, as a list by task."""
        return [*full] * (self.count - 1) + [*last]

    def seconds(self, part: LanePart, samples: Range) -> tuple[float, float]:
        """(forward, backward) of these samples of a micro-batch."""
        if not size_of(samples):
            return 0.0, 0.0
        if self.draft.splits(part.stage):
            key = part.device, *self.units[part.stage], size_of(samples)
            return self.cost.split_seconds(*key)[:2]
        return self.cost.stage_seconds(part.device, *self.units[part.stage], size_of(samples))

    def _results(
        self, carries: Direction, part: LanePart, others: Sequence[LanePart]
    ) -> list[Routes]:
        """Where a micro-batch's result goes, by micro-batch."""
        full: list[Routes] = [
            self.routes(carries, part, o, _common(part.full, o.full)) for o in others
        ]
        last = full
        if self.is_ragged:
            last = [self.routes(carries, part, o, _common(part.last, o.last)) for o in others]
        owners = others[0].owners
        if owners is not None:
            return [full[owner] for owner in owners[:-1]] + [last[owners[-1]]]
        return [tuple(chain(*full))] * (self.count - 1) + [tuple(chain(*last))]

    def routes(
        self, carries: Direction, sender: LanePart, receiver: LanePart, samples: int
    ) -> Routes:
        """The way of that many samples; none of no samples."""
        if not samples:
            return ()
        cut = self.draft.borders[max(sender.stage, receiver.stage)]
        ends = sender.lane, receiver.lane, sender.device, receiver.device
        return (route(self.cost, carries, ends, cut, samples),)

    def feed(self, part: LanePart) -> list[TransferRoute] | None:
        """What the holder sends a lane at either end; what is its own costs nothing."""
        holder, ends = self.cost.holder, (0, len(self.stages) - 1)
        if part.device == holder or part.stage not in ends:
            return None
        profile = self.cost.profile
        each = profile.input_bytes * (part.stage == 0) + profile.target_bytes * (
            part.stage == ends[1]
        )
        link = self.cost.link(holder, part.device)
        full, last = (
            TransferRoute(
                "input",
                FEED,
                part.lane,
                *self.cost.interfaces(holder, part.device),
                size_of(samples) * each / link.bytes_per_s,
                link.latency_s,
            )
            for samples in (part.full, part.last)
        )
        return self.by_task((full, full), (last, last))


def _senders(part: LanePart, others: Sequence[LanePart]) -> tuple[int, int]:
    """How many of `others` have a full micro-batch's, and the last one's, samples for `part`."""
    if not others or others[0].owners is not None:
        return len(others[:1]), len(others[:1])
    full = sum([_common(part.full, other.full) > 0 for other in others])
    return full, sum([_common(part.last, other.last) > 0 for other in others])


def size_of(samples: Range) -> int:
    return samples[1] - samples[0]


def _common(one: Range, other: Range) -> int:
    """How many samples two ranges have in common."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
