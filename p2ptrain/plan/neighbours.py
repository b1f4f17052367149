"""Small changes of a straight pipeline, for hill-climbing after the search by value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2ptrain.plan.draft import Draft
from p2ptrain.plan.partition import Placement

STEPS = (1, 2, 4, 8)
"""How many units a border moves at once."""


def neighbours(draft: Draft, spare: Sequence[int], *, private: bool) -> Iterator[Placement]:
    """Placements one change away: a border moved, devices swapped, one dropped, changed or added.

    Arguments:
        spare: devices that `draft` does not use.
        private: both ends stay where they are; one device alone has no neighbours then.
    """
    if private and len(draft.devices) == 1:
        return
    yield from _moved_borders(draft)
    last = len(draft.devices) - 1
    free = [p for p in range(last + 1) if not (private and p in (0, last))]
    yield from _swapped(draft, free)
    if len(draft.devices) > (3 if private else 1):
        yield from _dropped(draft, free)
    for device in spare:
        yield from _changed(draft, free, device)
        yield from _added(draft, device, private=private)


def _moved_borders(draft: Draft) -> Iterator[Placement]:
    """One border alone, two neighbouring ones, or all: what one stage loses another one gains."""
    inner = range(1, len(draft.borders) - 1)
    runs = [(p, p + width) for width in (1, 2) for p in inner if p + width - 1 in inner]
    if len(inner) > 2:
        runs.append((1, len(draft.borders) - 1))
    for first, end in runs:
        for step in STEPS:
            for shift in (-step, step):
                moved = _shifted(draft.borders, first, end, shift)
                if moved is not None:
                    yield moved, draft.devices


def _shifted(borders: tuple[int, ...], first: int, end: int, shift: int) -> tuple[int, ...] | None:
    moved = tuple(border + shift for border in borders[first:end])
    if borders[first - 1] < moved[0] and moved[-1] < borders[end]:
        return (*borders[:first], *moved, *borders[end:])
    return None


def _swapped(draft: Draft, free: Sequence[int]) -> Iterator[Placement]:
    for p in free:
        for q in free:
            if p < q:
                devices = list(draft.devices)
                devices[p], devices[q] = devices[q], devices[p]
                yield draft.borders, tuple(devices)


def _dropped(draft: Draft, free: Sequence[int]) -> Iterator[Placement]:
    borders, devices = draft.borders, draft.devices
    for p in free:
        rest = (*devices[:p], *devices[p + 1 :])
        # Its units go to the stage before or to the one after; the pipeline's ends stay.
        for cut in {p, p + 1} - {0, len(devices)}:
            yield (*borders[:cut], *borders[cut + 1 :]), rest


def _changed(draft: Draft, free: Sequence[int], device: int) -> Iterator[Placement]:
    devices = draft.devices
    for p in free:
        yield draft.borders, (*devices[:p], device, *devices[p + 1 :])


def _added(draft: Draft, device: int, *, private: bool) -> Iterator[Placement]:
    """The new device takes the second or the first half of a stage, or a unit of it."""
    borders, devices = draft.borders, draft.devices
    for p, (first, end) in enumerate(draft.units):
        middle = (first + end) // 2
        for cut in sorted({middle, end - 1} - {first}):
            after = (*devices[: p + 1], device, *devices[p + 1 :])
            if not (private and p == len(devices) - 1):
                yield (*borders[: p + 1], cut, *borders[p + 1 :]), after
        for cut in sorted({middle, first + 1} - {first, end}):
            before = (*devices[:p], device, *devices[p:])
            if not (private and p == 0):
                yield (*borders[: p + 1], cut, *borders[p + 1 :]), before
