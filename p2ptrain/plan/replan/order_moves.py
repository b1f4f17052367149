"""Small changes of the order of a pipeline's stages, most promising kinds first.

What a light re-plan considers besides moving cut points. The dead device's place may suit another
one; a link that was not used before may be slow, so that stages change places; a spare device may
pay; a device that became slow may not pay any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from p2ptrain.plan.cost.draft import UnplacedGroup
from p2ptrain.plan.replan.order_cuts import Order
from p2ptrain.plan.types.allocation import Allocation


@dataclass(frozen=True, slots=True)
class Reshaper:
    """What may change.

    Attributes:
        required: devices that must stay.
        private: the first and the last stage are the holder's and stay.
        groups: how new groups may divide their work; none: there are to be no new ones.
        most_stages: units of the model.
        holder: the data holder.
    """

    required: frozenset[int]
    private: bool
    groups: frozenset[Allocation]
    most_stages: int
    holder: int

    def near(self, order: Order, spare: Sequence[int], most: int) -> list[Order]:
        """`order` itself and at most `most` orders one change away, without repetition."""
        changes = (one for one in self._changes(order, spare) if self._is_possible(one))
        unique = dict.fromkeys((order, *islice(changes, 4 * most)))
        return list(islice(unique, most + 1))

    def _is_possible(self, order: Order) -> bool:
        used = [device for part in order for device in part.devices]
        if not all(self._may_be(part) for part in order):
            return False
        return len(order) <= self.most_stages and self.required <= set(used)

    def _may_be(self, part: UnplacedGroup) -> bool:
        return len(part.devices) == 1 or not self.groups or part.allocation in self.groups

    def _free(self, order: Order) -> range:
        """Places of stages that may change."""
        return range(1, len(order) - 1) if self.private else range(len(order))

    def _changes(self, order: Order, spare: Sequence[int]) -> Iterator[Order]:
        if self.private and len(order) == 1:
            ends = UnplacedGroup((self.holder,))
            yield from ((ends, UnplacedGroup((device,)), ends) for device in spare)
            return
        free = self._free(order)
        if self.private and len(free) == 1:
            yield (order[0],)
        for p in free:
            if len(free) > 1:
                yield (*order[:p], *order[p + 1 :])
        for device in spare:
            yield from self._with_spare(order, device)
        yield from self._moved(order)
        if self.groups or any(len(part.devices) > 1 for part in order):
            yield from self._regrouped(order, spare)
        yield from self._swapped(order)

    def _with_spare(self, order: Order, device: int) -> Iterator[Order]:
        part, free = UnplacedGroup((device,)), self._free(order)
        for p in range(free.start, free.stop + 1):
            yield (*order[:p], part, *order[p:])
        for p in free:
            yield (*order[:p], part, *order[p + 1 :])

    def _moved(self, order: Order) -> Iterator[Order]:
        """Near places first."""
        free = self._free(order)
        pairs = [(p, q) for p in free for q in free if p != q and q != p - 1]
        for p, q in sorted(pairs, key=lambda pair: abs(pair[0] - pair[1])):
            rest = [*order[:p], *order[p + 1 :]]
            rest.insert(q, order[p])
            yield tuple(rest)

    def _swapped(self, order: Order) -> Iterator[Order]:
        free = self._free(order)
        for p in free:
            for q in free:
                if q > p + 1:
                    parts = list(order)
                    parts[p], parts[q] = parts[q], parts[p]
                    yield tuple(parts)

    def _regrouped(self, order: Order, spare: Sequence[int]) -> Iterator[Order]:
        """Members leave a group or change sides; with `groups` new groups too."""
        free = self._free(order)
        for p in free:
            if len(order[p].devices) > 1:
                yield from self._split(order, p)
        if not self.groups:
            return
        for p in free:
            for device in spare:
                yield from _grouped(order[:p], (*order[p].devices, device), order[p + 1 :])
            if p + 1 in free:
                both = (*order[p].devices, *order[p + 1].devices)
                yield from _grouped(order[:p], both, order[p + 2 :])

    def _split(self, order: Order, p: int) -> Iterator[Order]:
        for device in order[p].devices:
            rest = tuple(other for other in order[p].devices if other != device)
            without = _with(order, p, rest)
            yield without
            for q in (p - 1, p + 1):
                if q in self._free(order) and len(order[q].devices) > 1:
                    yield _with(without, q, (*order[q].devices, device))
            for q in (p, p + 1):
                yield (*without[:q], UnplacedGroup((device,)), *without[q:])


def _grouped(before: Order, devices: tuple[int, ...], after: Order) -> Iterator[Order]:
    """A new group that deals whole micro-batches (no device computes small pieces), or divides."""
    for allocation in (Allocation.MICRO_BATCHES, Allocation.SAMPLES):
        yield (*before, UnplacedGroup(devices, allocation), *after)


def _with(order: Order, p: int, devices: tuple[int, ...]) -> Order:
    allocation = order[p].allocation if len(devices) > 1 else Allocation.SAMPLES
    return (*order[:p], replace(order[p], devices=devices, allocation=allocation), *order[p + 1 :])


def shifts(borders: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One border moved by a unit or a few, or a unit from the first stage to the last or back."""
    last = len(borders) - 1
    runs = [(p, p + 1) for p in range(1, last)]
    if last > 2:
        runs.append((1, last))
    for first, end in runs:
        for shift in (-3, -1, 1, 3):
            moved = tuple(border + shift for border in borders[first:end])
            if borders[first - 1] < moved[0] and moved[-1] < borders[end]:
                yield (*borders[:first], *moved, *borders[end:])
