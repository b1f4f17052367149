"""Changes of a draft's structure: borders, which devices form a stage, which devices take part.

A change keeps the groups it does not touch and names the others by their kind; their shares are
then balanced again (`shares.Drafter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from p2ptrain.plan.cost.draft import Draft, StageGroup, UnplacedGroup
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation

STEPS = (1, 2, 4, 8)
"""How many units a border moves at once."""


MAX_SPARE = 8
"""Devices not used, the fastest, each of which a change may bring in."""

FEW = 4
"""Up to so many devices of a group change one by one; of more, those at its ends do together."""

Devices: TypeAlias = tuple[int, ...]

Stage: TypeAlias = StageGroup | UnplacedGroup

Layout: TypeAlias = tuple[tuple[int, ...], tuple[Stage, ...]]
"""Borders, and a stage between each two of them."""


def coarse_changes(draft: Draft, spare: Sequence[int], question: Question) -> Iterator[Layout]:
    """Layouts one change away; `spare` are devices that the draft does not use."""
    layouts = chain(_moved_borders(draft), regrouped(draft, spare, question))
    return _obeying(layouts, question)


def _obeying(layouts: Iterable[Layout], question: Question) -> Iterator[Layout]:
    """Each with groups that divide their work as they may, once."""
    if not question.groups or question.allocations == EVERY_ALLOCATION:
        yield from layouts
        return
    seen: set[Layout] = set()
    for borders, stages in layouts:
        layout = borders, tuple(_permitted(stage, question) for stage in stages)
        if layout not in seen:
            seen.add(layout)
            yield layout


def _permitted(stage: Stage, question: Question) -> Stage:
    if (
        isinstance(stage, StageGroup)
        or len(stage.devices) == 1
        or question.permit(deals=stage.deals)
    ):
        return stage
    return _kind(stage.devices, deals=not stage.deals)


def regrouped(draft: Draft, spare: Sequence[int], question: Question) -> Iterator[Layout]:
    """Those of them with other stages, whose groups may divide their work as they must not."""
    free = [p for p in range(len(draft.groups)) if p not in question.pinned(len(draft.groups))]
    if not free:
        return
    yield from _merged(draft, free)
    if question.groups:
        yield from _toggled(draft, free)
        yield from _moved_devices(draft, free)
    yield from _swapped(draft, free)
    yield from _dropped(draft, free)
    yield from _split(draft, free)
    for device in spare[:MAX_SPARE]:
        yield from _taken_in(draft, free, (device,), question)
    size = 2
    while question.groups and len(draft.devices) > FEW and size <= len(spare):
        yield from _taken_in(draft, free, tuple(spare[:size]), question)
        size *= 2


def _handfuls(devices: Devices) -> Iterator[Devices]:
    """What may leave a group together: each one of a few; of many the first or the last few."""
    if len(devices) <= FEW:
        yield from ((device,) for device in devices)
        return
    size = 1
    while size < len(devices):
        yield devices[:size]
        yield devices[-size:]
        size *= 2


def taking_in(draft: Draft, device: int, question: Question) -> Iterator[Layout]:
    """Only those changes that give `device`, which the draft does not use, a part."""
    free = [p for p in range(len(draft.groups)) if p not in question.pinned(len(draft.groups))]
    if free:
        yield from _obeying(_taken_in(draft, free, (device,), question), question)


def _kind(devices: Sequence[int], *, deals: bool) -> UnplacedGroup:
    """`deals` says that they take whole micro-batches, not samples of each."""
    several = deals and len(devices) > 1
    return UnplacedGroup(
        tuple(devices), Allocation.MICRO_BATCHES if several else Allocation.SAMPLES
    )


def _replaced(draft: Draft, changed: dict[int, Sequence[int]]) -> Layout:
    """Other devices in some stages; one that has none left goes to its neighbours."""
    stages: list[Stage] = []
    borders = [0]
    for p, group in enumerate(draft.groups):
        devices = changed.get(p, group.devices)
        if not devices:
            continue
        stages.append(_kind(devices, deals=group.deals) if p in changed else group)
        borders.append(draft.borders[p + 1])
    borders[-1] = draft.borders[-1]
    return tuple(borders), tuple(stages)


def _moved_borders(draft: Draft) -> Iterator[Layout]:
    """One border alone, two neighbouring ones, or all."""
    inner = range(1, len(draft.borders) - 1)
    runs = [(p, p + width) for width in (1, 2) for p in inner if p + width - 1 in inner]
    if len(inner) > 2:
        runs.append((1, len(draft.borders) - 1))
    for first, end in runs:
        for step in STEPS:
            for shift in (-step, step):
                moved = tuple(border + shift for border in draft.borders[first:end])
                if draft.borders[first - 1] < moved[0] and moved[-1] < draft.borders[end]:
                    borders = (*draft.borders[:first], *moved, *draft.borders[end:])
                    yield (
                        borders,
                        tuple(_kind(group.devices, deals=group.deals) for group in draft.groups),
                    )


def _toggled(draft: Draft, free: Sequence[int]) -> Iterator[Layout]:
    for p in free:
        group = draft.groups[p]
        if len(group.devices) > 1:
            other = _kind(group.devices, deals=not group.deals)
            yield draft.borders, (*draft.groups[:p], other, *draft.groups[p + 1 :])


def _merged(draft: Draft, free: Sequence[int]) -> Iterator[Layout]:
    """Two neighbouring stages as one group."""
    for p in free:
        if p + 1 in free:
            devices = draft.groups[p].devices + draft.groups[p + 1].devices
            borders = (*draft.borders[: p + 1], *draft.borders[p + 2 :])
            for deals in (False, True):
                merged = _kind(devices, deals=deals)
                yield borders, (*draft.groups[:p], merged, *draft.groups[p + 2 :])


def _moved_devices(draft: Draft, free: Sequence[int]) -> Iterator[Layout]:
    """One device joins another group; several join the one before or behind."""
    for p in free:
        devices = draft.groups[p].devices
        for moved in _handfuls(devices):
            left = _without(devices, moved)
            for q in free:
                if q != p and (len(devices) <= FEW or abs(p - q) == 1):
                    other = draft.groups[q].devices
                    joined = (*other, *moved) if q < p or len(devices) <= FEW else (*moved, *other)
                    yield _replaced(draft, {p: left, q: joined})


def _without(devices: Devices, gone: Devices) -> Devices:
    return tuple(device for device in devices if device not in gone)


def _swapped(draft: Draft, free: Sequence[int]) -> Iterator[Layout]:
    groups = [group.devices for group in draft.groups]
    ones = [[few[0] for few in _handfuls(devices) if len(few) == 1] for devices in groups]
    for p in free:
        for q in free:
            if p < q:
                for one in ones[p]:
                    for other in ones[q]:
                        yield _replaced(
                            draft,
                            {
                                p: [other if d == one else d for d in groups[p]],
                                q: [one if d == other else d for d in groups[q]],
                            },
                        )
                if len(groups[p]) + len(groups[q]) > 2:
                    stages: list[Stage] = list(draft.groups)
                    stages[p], stages[q] = stages[q], stages[p]
                    yield draft.borders, tuple(stages)


def _dropped(draft: Draft, free: Sequence[int]) -> Iterator[Layout]:
    if len(draft.devices) == 1:
        return
    for p in free:
        devices = draft.groups[p].devices
        for gone in _handfuls(devices):
            left = _without(devices, gone)
            if left:
                yield _replaced(draft, {p: left})
                continue
            for cut in sorted({p, p + 1} - {0, len(draft.groups)}):
                borders = (*draft.borders[:cut], *draft.borders[cut + 1 :])
                yield borders, (*draft.groups[:p], *draft.groups[p + 1 :])


def _split(draft: Draft, free: Sequence[int]) -> Iterator[Layout]:
    """Some of a group get a stage of their own, before or behind the others."""
    for p in free:
        group, (first, end) = draft.groups[p], draft.units[p]
        if len(group.devices) == 1 or end - first < 2:
            continue
        for few in _handfuls(group.devices):
            own = _kind(few, deals=group.deals)
            others = _kind(_without(group.devices, few), deals=group.deals)
            share = max(1, round((end - first) * len(few) / len(group.devices)))
            for cut, pair in ((first + share, (own, others)), (end - share, (others, own))):
                borders = (*draft.borders[: p + 1], cut, *draft.borders[p + 1 :])
                yield borders, (*draft.groups[:p], *pair, *draft.groups[p + 1 :])


def _taken_in(
    draft: Draft, free: Sequence[int], new: Devices, question: Question
) -> Iterator[Layout]:
    """New devices replace as many, join a group, or get a stage of their own."""
    for p in free:
        group = draft.groups[p]
        for old in _handfuls(group.devices):
            if len(old) == len(new):
                place, others = group.devices.index(old[0]), _without(group.devices, old)
                yield _replaced(draft, {p: (*others[:place], *new, *others[place:])})
        if question.groups:
            joined = (*group.devices, *new)
            for deals in sorted({group.deals, False}):
                stage = _kind(joined, deals=deals)
                yield draft.borders, (*draft.groups[:p], stage, *draft.groups[p + 1 :])
    yield from _added(draft, new, question)


def _added(draft: Draft, new: Devices, question: Question) -> Iterator[Layout]:
    """Half of a stage's units, or one of them, before or behind the rest of it."""
    pinned = question.pinned(len(draft.groups))
    for p, (first, end) in enumerate(draft.units):
        group, middle = draft.groups[p], (first + end) // 2
        own = _kind(new, deals=group.deals)
        for cut in sorted({middle, end - 1} - {first, end}):
            if p + 1 not in pinned or p + 1 < len(draft.groups):
                borders = (*draft.borders[: p + 1], cut, *draft.borders[p + 1 :])
                yield borders, (*draft.groups[: p + 1], own, *draft.groups[p + 1 :])
        for cut in sorted({middle, first + 1} - {first, end}):
            borders = (*draft.borders[: p + 1], cut, *draft.borders[p + 1 :])
            yield borders, (*draft.groups[:p], own, group, *draft.groups[p + 1 :])
