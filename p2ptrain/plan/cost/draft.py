"""A plan being considered: which device (an index) computes which units, and nothing predicted.

Planners compare thousands of drafts and turn the best one into a `Plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import (
    Allocation,
    BatchSplit,
    deal,
    max_in_window,
    sample_ranges,
)
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.plan.types.schedule import usual_warmup
from p2ptrain.plan.types.weight_versions import versions_kept


@dataclass(frozen=True, slots=True)
class StageGroup:
    """The devices of one stage and what each takes; a device alone takes everything.

    Attributes:
        devices: in the order of their sample ranges.
        shares: samples of each micro-batch, or whole micro-batches of a round.
    """

    devices: tuple[int, ...]
    shares: tuple[int, ...]
    allocation: Allocation = Allocation.SAMPLES

    @property
    def deals(self) -> bool:
        """Whether several devices take whole micro-batches in turn."""
        return len(self.devices) > 1 and self.allocation is Allocation.MICRO_BATCHES

    def ranges(self, samples: int) -> tuple[tuple[int, int], ...]:
        """[first, end) of a micro-batch of `samples` that each device has of those it takes."""
        if len(self.devices) == 1 or self.deals:
            return ((0, samples),) * len(self.devices)
        return sample_ranges(self.shares, samples)

    def piece_counts(self, split: BatchSplit, place: int) -> dict[int, int]:
        """How many micro-batches of so many samples, above 0, the device at `place` takes.

        The samples of the last one that it takes come last.
        """
        (first, end), (last_first, last_end) = (
            self.ranges(samples)[place] for samples in (split.first_samples, split.last_samples)
        )
        count, last = split.micro_batches - 1, 1
        if self.deals:
            last = int(deal(self.shares)[-1] == place)
            count = self.shares[place] - last
        found: dict[int, int] = {}
        for samples, n in ((end - first, count), (last_end - last_first, last)):
            if samples and n:
                found[samples] = found.get(samples, 0) + n
        return found

    def round_samples(self, split: BatchSplit, place: int) -> int:
        """That the device at `place` takes."""
        return sum(samples * n for samples, n in self.piece_counts(split, place).items())

    def in_flight_samples(self, split: BatchSplit, place: int, warmup: int) -> int:
        """Most samples that a device has forwarded and not yet backwarded at that stage depth."""
        if len(self.devices) == 1:
            return split.in_flight_samples(warmup)
        if self.deals:
            count, has_last = max_in_window(self.shares, place, warmup)
            return count * split.micro_batch - has_last * (split.micro_batch - split.last_samples)
        if warmup < split.micro_batches:
            return warmup * self.shares[place]
        first, end = sample_ranges(self.shares, split.last_samples)[place]
        return (warmup - 1) * self.shares[place] + end - first

    def in_flight_versions(self, place: int, warmup: int) -> int:
        """Most mini-batches that a device has forwarded and not yet backwarded, asynchronously.

        Each has weights of its own. Windows follow one another without a border.
        """
        if not self.deals:
            return warmup
        most, _ = max_in_window(tuple(2 * share for share in self.shares), place, warmup)
        return most


@dataclass(frozen=True, slots=True)
class UnplacedGroup:
    """Devices of one stage, in the order of their sample ranges; what each takes is not known."""

    devices: tuple[int, ...]
    allocation: Allocation = Allocation.SAMPLES

    @property
    def deals(self) -> bool:
        """Whether they take whole micro-batches in turn."""
        return self.allocation is Allocation.MICRO_BATCHES


@dataclass(frozen=True, slots=True)
class Draft:
    """Stage p is units [borders[p], borders[p+1]) on groups[p] with depth warmup[p].

    No device stands twice, but one alone in the first and in the last stage (`--private`).

    Attributes:
        held: by stage the most micro-batches that may be without their weight gradients, at least
            its depth; 0 = its backward is not split. Empty where none is (`schedule.py`).
    """

    split: BatchSplit
    borders: tuple[int, ...]
    groups: tuple[StageGroup, ...]
    warmup: tuple[int, ...]
    held: tuple[int, ...] = ()

    def splits(self, p: int) -> bool:
        """Whether stage p computes the gradients of its weights apart from those of its inputs."""
        return bool(self.held) and self.held[p] > 0

    def in_flight(self, p: int) -> int:
        """Most micro-batches of which stage p keeps activations."""
        return self.held[p] if self.splits(p) else self.warmup[p]

    @property
    def units(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of every stage."""
        return tuple(pairwise(self.borders))

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, stage by stage; of a straight pipeline one a stage."""
        return tuple(device for group in self.groups for device in group.devices)

    @property
    def is_straight(self) -> bool:
        """Whether every stage is a single device."""
        return all(len(group.devices) == 1 for group in self.groups)

    @property
    def shared_ends(self) -> bool:
        """Whether one device has the first and the last of several stages."""
        return len(self.groups) > 1 and self.groups[0].devices == self.groups[-1].devices


def alone(split: BatchSplit, device: int) -> StageGroup:
    """A device that has a stage for itself."""
    return StageGroup((device,), (split.micro_batch,))


def draft_pipeline(
    cost: CostModel,
    split: BatchSplit,
    borders: Sequence[int],
    devices: Sequence[int],
    wanted: Sequence[int] | None = None,
) -> Draft | None:
    """`draft_groups` of a straight pipeline."""
    groups = [alone(split, device) for device in devices]
    return draft_groups(cost, split, borders, groups, wanted)


def draft_groups(
    cost: CostModel,
    split: BatchSplit,
    borders: Sequence[int],
    groups: Sequence[StageGroup],
    wanted: Sequence[int] | None = None,
) -> Draft | None:
    """The draft with the depths wanted (usual: `usual_depths`), lowered where memory is short.

    Depths never grow from one stage to the next. Of two ends that share one device's memory the
    first has its depth before the last; `wanted` may trade between them. None where a device cannot
    hold its units with even one micro-batch in flight (with `full_depths`, as many as are wanted),
    or where the devices of a group compute with different things.
    Asynchronously always the usual depths: they are how many updates old the weights are, which the
    user knows from the number of stages.
    """
    if cost.is_mixed and not all(cost.may_share(group.devices) for group in groups):
        return None
    usual = usual_depths(groups, split.micro_batches, cost.mode)
    depths = list(usual if cost.mode is PlanMode.ASYNC else wanted or usual)
    draft = Draft(split, tuple(borders), tuple(groups), tuple(depths))
    last, limit = len(groups) - 1, split.micro_batches
    # Ends on one device: the first is as deep as the last allows with a depth of one, and the last
    # as deep as the first then leaves it memory.
    for p in range(len(groups)):
        limit = min(limit, depths[p])
        taken = 0
        if draft.shared_ends and p in (0, last):
            other, depth = (last, 1) if p == 0 else (0, depths[0])
            taken = _place_bytes(cost, draft, other, depth, 0)
        limit = depths[p] = _deepest_that_fits(cost, draft, p, limit, taken)
        if limit < (usual[p] if cost.full_depths else 1):
            return None
    return replace(draft, warmup=tuple(depths))


def usual_depths(
    groups: Sequence[StageGroup], micro_batches: int, mode: PlanMode = PlanMode.SYNC
) -> tuple[int, ...]:
    """K_p of every stage, at most `micro_batches`.

    2(P-p)-1 (Asteroid, section 3.2), which is the stages from p to the end and the links between;
    a stage that deals whole micro-batches counts all its devices. Asynchronously without the links:
    K_0 is PipeDream's NOAM, and n-p in a straight pipeline of n stages.
    """
    if mode is PlanMode.SYNC and not any(group.deals for group in groups):
        return usual_warmup(len(groups), micro_batches)
    depths, devices = [], 0
    for links, group in enumerate(reversed(groups)):
        devices += len(group.devices) if group.deals else 1
        depths.append(min(devices + links * (mode is PlanMode.SYNC), micro_batches))
    return tuple(reversed(depths))


def with_held(cost: CostModel, draft: Draft, wanted: Sequence[int]) -> Draft:
    """`draft` with its backwards split as wanted by stage (0 = not), as far as memory allows.

    A stage never holds fewer micro-batches than its depth, which `draft` has room for, nor more
    than there are.
    """
    count, last = draft.split.micro_batches, len(wanted) - 1
    held = [0] * len(wanted)
    for p in range(len(wanted)):
        if wanted[p]:
            other, taken = last - p, 0
            if draft.shared_ends and p in (0, last):
                taken = _place_bytes(cost, draft, other, held[other] or draft.warmup[other], 0)
            limit = max(draft.warmup[p], min(wanted[p], count))
            fitting = _deepest_that_fits(cost, draft, p, limit, taken)
            held[p] = max(draft.warmup[p], fitting)
    return replace(draft, held=tuple(held) if any(held) else ())


def split_backwards(cost: CostModel, draft: Draft, held: int, *, first: bool) -> Draft:
    """Every stage holds `held` micro-batches, as far as memory allows; the first only if asked."""
    wanted = [held] * len(draft.groups)
    if not first:
        wanted[0] = 0
    return with_held(cost, draft, wanted)


def split_usually(cost: CostModel, draft: Draft) -> Draft:
    """Every stage holds what the first one has in flight, as far as memory allows.

    That is ZB-H1 or ZB-H2 of Qi et al. 2023 (section 2.3), depending on how deep it is. No
    stage waits for a first stage of one device, so that its backward stays whole.
    """
    return split_backwards(cost, draft, draft.warmup[0], first=len(draft.groups[0].devices) > 1)


def peak_bytes(cost: CostModel, draft: Draft) -> dict[int, int]:
    """Peak memory by device."""
    peaks: dict[int, int] = {}
    for p in range(len(draft.groups)):
        for device, stage_bytes in _stage_bytes(cost, draft, p, draft.in_flight(p)):
            peaks[device] = peaks.get(device, 0) + stage_bytes
    return peaks


def _stage_bytes(cost: CostModel, draft: Draft, p: int, warmup: int) -> Iterator[tuple[int, int]]:
    """(device, bytes) of stage p at a depth."""
    for place, device in enumerate(draft.groups[p].devices):
        yield device, _place_bytes(cost, draft, p, warmup, place)


def _place_bytes(cost: CostModel, draft: Draft, p: int, warmup: int, place: int) -> int:
    """Memory of one device of stage p at a depth."""
    group = draft.groups[p]
    if cost.mode is PlanMode.SYNC:
        samples, versions = group.in_flight_samples(draft.split, place, warmup), 1
    else:
        in_flight = group.in_flight_versions(place, warmup)
        samples = in_flight * max(group.piece_counts(draft.split, place), default=0)
        versions = versions_kept(cost.weights, in_flight, max(draft.warmup[0], in_flight))
    return cost.peak_bytes(*draft.units[p], samples, versions)


def _overfull(
    cost: CostModel, draft: Draft, p: int, warmup: int, places: Iterable[int], taken: int
) -> list[int]:
    """Those `places` of stage p whose device has not enough memory at that depth."""
    devices = draft.groups[p].devices
    return [
        place
        for place in places
        if taken + _place_bytes(cost, draft, p, warmup, place)
        > cost.devices[devices[place]].memory_bytes
    ]


def _deepest_that_fits(cost: CostModel, draft: Draft, p: int, limit: int, taken: int) -> int:
    """The deepest warm-up up to `limit` with which stage p fits everywhere; 0 = none does."""
    group = draft.groups[p]
    if len(group.devices) == 1 and cost.mode is PlanMode.SYNC:
        memory = cost.devices[group.devices[0]].memory_bytes - taken
        return min(limit, draft.split.deepest(cost.samples_that_fit(*draft.units[p], memory)))
    tight = _overfull(cost, draft, p, limit, range(len(group.devices)), taken)
    low, high = 0, limit  # depths up to `low` fit, those above `high` do not
    if not tight:
        low = limit
    while low < high:
        middle = (low + high + 1) // 2
        if not _overfull(cost, draft, p, middle, tight, taken):
            low = middle
        else:
            high = middle - 1
    return low


def place_seconds(
    cost: CostModel,
    split: BatchSplit,
    group: StageGroup,
    place: int,
    units: tuple[int, int],
    *,
    splits: bool = False,
) -> float:
    """A device's load: all that the one at `place` computes of a stage in a round.

    With overlap its messages are part of that; an update and its sums are not.

    Arguments:
        splits: backwards are split.
    """
    device, of = group.devices[place], cost.split_seconds if splits else cost.stage_seconds
    pieces = group.piece_counts(split, place)
    return sum(count * sum(of(device, *units, samples)) for samples, count in pieces.items())


def message_seconds(
    cost: CostModel, split: BatchSplit, group: StageGroup, place: int, units: tuple[int, int]
) -> float:
    """Of a device's load what its pieces' messages take; nothing in the plain model."""
    if cost.overlap is None:
        return 0.0
    device, of = group.devices[place], cost.overlap.task_seconds
    pieces = group.piece_counts(split, place)
    return sum(count * sum(of(device, *units, samples)) for samples, count in pieces.items())


def device_loads(cost: CostModel, draft: Draft) -> dict[int, float]:
    """The same of each device of a draft, in all of its stages."""
    loads = dict.fromkeys(draft.devices, 0.0)
    for p, (group, units) in enumerate(zip(draft.groups, draft.units, strict=True)):
        for place, device in enumerate(group.devices):
            loads[device] += place_seconds(
                cost, draft.split, group, place, units, splits=draft.splits(p)
            )
    return loads


def task_seconds(
    cost: CostModel, draft: Draft, p: int, device: int, samples: int
) -> tuple[float, float]:
    """(forward, backward) of stage p; of a split backward only the part of the inputs."""
    if draft.splits(p):
        return cost.split_seconds(device, *draft.units[p], samples)[:2]
    return cost.stage_seconds(device, *draft.units[p], samples)
