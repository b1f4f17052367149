"""Orders of stages that are worth cutting, by the value of their best cuts.

Along a few sensible orders of the devices, of the fastest few and of more, neighbours form stages
in a few shapes; `problem/order_cuts.py` cuts them all at once:

    straight    a | b | c | d         first in front    a b c | d       halves    a b | c d
    one stage   a b c d               last behind       a | b c d

Then orders one change away from the best ones are looked at, and from those that turn out to be
better. Values only rank; bounds and simulations judge what is made of the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, pairwise, permutations
from math import comb, inf, perm
from typing import TypeAlias

from p2ptrain.plan.cost.draft import Draft, StageGroup, UnplacedGroup
from p2ptrain.plan.problem.candidates import fastest, likely_orders, useful_cuts, whole_seconds
from p2ptrain.plan.problem.order_cuts import Order, OrderCuts, Singles
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.structure_moves import regrouped
from p2ptrain.plan.types.allocation import Allocation, BatchSplit

MAX_CUTS = 24
"""Places where a model may be cut; the climb afterwards moves borders unit by unit."""

MAX_STRAIGHT = 12
"""Devices of a straight pipeline that a search starts from."""

SOME = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of devices, the fastest, of which stages are formed, beside each number up to the first
where there are few: values do not see how transfers of wide groups get in each other's way."""

PIECES, PIECES_OF_WIDE = 3, 6
"""Of an order, which are joined to stages; of many devices."""

LENGTHS = 4
"""Numbers of stages, the best, of which one order each is looked at in turn: of many devices the
very best orders differ in little that counts."""

MAX_SPARE = 4
"""Unused devices considered, fastest first."""

PRIVATE_WEIGHTS = (1.0, 2.0, 4.0)
"""Of a private plan's last stage, which shares its device's time with the first."""

PAIR_ELEMENTS = 10
"""What a pair of an order's devices costs beside its elements: how fast they reach each other."""

ROOMY = 1 << 10
"""Units of a stage while only its devices are changed."""

DevicePlacement: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""(borders, devices) of a straight draft."""


class OrderSearch:
    """Orders of one question and split, and what they are worth.

    Attributes:
        values: seconds of a round with the best cuts, by order.
        weights: of the last stage, each of which is tried.
    """

    def __init__(
        self, question: Question, split: BatchSplit, cuts: OrderCuts, places: Sequence[int]
    ) -> None:
        """`places`: numbers of those cuts that are tried while orders are compared."""
        self.question, self.split, self.cuts, self.places = question, split, cuts, places
        self.weights = PRIVATE_WEIGHTS if question.private else (1.0,)
        self.values: dict[Order, float] = {}

    @classmethod
    def of(cls, question: Question, split: BatchSplit) -> OrderSearch:
        """With the most useful cuts."""
        cost = question.cost
        where = (0, *useful_cuts(cost, MAX_CUTS), cost.unit_count)
        cuts = OrderCuts(cost, split, question.caps, private=question.private, cuts=where)
        return cls(question, split, cuts, range(len(where)))

    def straight(self) -> OrderSearch:
        """The same without groups, begun with what is known."""
        found = OrderSearch(
            replace(self.question, groups=False), self.split, self.cuts, self.places
        )
        found.values = {
            order: value
            for order, value in self.values.items()
            if all(len(part.devices) == 1 for part in order)
        }
        return found

    def least_value(self) -> float:
        """Of the best order."""
        return min(self.values.values(), default=inf)

    def ranked(self) -> list[Order]:
        """Best first; of equals those valued first."""
        return sorted(self.values, key=lambda order: self.values[order])

    def add(self, orders: Iterable[Order]) -> None:
        """Value orders, as far as there are places enough to cut them."""
        new = [o for o in dict.fromkeys(orders) if o and o not in self.values]
        for same in by_length([order for order in new if len(order) < len(self.places)]):
            found, _ = self.cuts.solve(
                same * len(self.weights),
                self.places,
                last_weights=[weight for weight in self.weights for _ in same],
            )
            least = found.reshape(-1, len(same)).min(axis=0).tolist()
            self.values.update(zip(same, least, strict=True))

    def look_around(self, looks: int, most_elements: int) -> None:
        """Value the neighbours of the best, of the next best, and so on while there is room.

        Arguments:
            most_elements: of the dynamic programmes (orders x stages x places^2), and of what
                pairs of devices cost.
        """
        room, looked_at = most_elements, set[Order]()
        for look in range(looks):
            best = self._most_promising(looked_at, look)
            if best is None or room <= 0:
                break
            looked_at.add(best)
            devices = sum(len(part.devices) for part in best)
            size = len(best) * len(self.places) ** 2 * len(self.weights)
            size += PAIR_ELEMENTS * devices**2
            near = (order for order in self._near(best) if order not in self.values)
            new = list(islice(dict.fromkeys(near), room // size))
            room -= size * len(new)
            self.add(new)

    def _most_promising(self, looked_at: set[Order], turn: int) -> Order | None:
        """The best order not looked at; of many devices the best of the next number of stages."""
        best: dict[int, Order] = {}
        for order, value in self.values.items():
            known = best.get(len(order))
            if order not in looked_at and (known is None or value < self.values[known]):
                best[len(order)] = order
        ranked = sorted(best.values(), key=lambda order: self.values[order])
        lengths = LENGTHS if self.question.is_wide else 1
        return ranked[turn % min(lengths, len(ranked))] if ranked else None

    def exactly(
        self, same: list[Order], places: Sequence[int]
    ) -> tuple[Singles, list[list[list[int]]]]:
        """Of orders of one length: mean value of both views of a link, and borders in each view."""
        variants = [(duplex, weight) for duplex in (True, False) for weight in self.weights]
        values, borders = self.cuts.solve(
            same * len(variants),
            places,
            [duplex for duplex, _ in variants for _ in same],
            [weight for _, weight in variants for _ in same],
        )
        table = values.reshape(2, len(self.weights), len(same)).min(axis=1)
        rows = borders.reshape(len(variants), len(same), -1)
        return table.mean(axis=0), [rows[:, i].tolist() for i in range(len(same))]

    def least_order(self) -> Order:
        """The devices that must have a part, one a stage; else any one."""
        ends, inner = self._ends, inner_devices(self.question)
        required = self.question.required
        needed = [d for d in inner if d in required] or ([] if ends else inner[:1])
        return (*ends, *map(_alone, needed), *ends) if needed else ends

    @property
    def _ends(self) -> Order:
        question = self.question
        return (_alone(question.cost.holder),) if question.private else ()

    # -- where a search begins --------------------------------------------------------------------

    def starts(self, *, few: bool = False) -> Iterator[Order]:
        """Orders of many shapes; `few` are enough to compare splits."""
        inner, ends, question = inner_devices(self.question), self._ends, self.question
        seconds = {device: whole_seconds(question.cost, device) for device in inner}
        by_speed = sorted(inner, key=lambda device: seconds[device])
        yield self.least_order()
        yield ends
        numbers = [*range(1, SOME[0]), *SOME]
        if question.is_wide:
            numbers = [1, 2, 4, *(SOME[::2] if few else SOME)]
        for count in dict.fromkeys(min(number, len(inner)) for number in numbers if inner):
            for order in likely_orders(question.cost, by_speed[:count])[: 2 if few else None]:
                if count <= MAX_STRAIGHT:
                    yield (*ends, *map(_alone, order), *ends)
                if question.groups and count > 1:
                    yield from ((*ends, *one, *ends) for one in self._in_shapes(order))

    def _in_shapes(self, devices: Sequence[int]) -> Iterator[Order]:
        ways = [way for way in Allocation if way in self.question.allocations]
        pieces = PIECES_OF_WIDE if self.question.is_wide else PIECES
        for shape in _shapes(len(devices), pieces):
            for way in ways:
                first, parts = 0, list[UnplacedGroup]()
                for size in shape:
                    members = tuple(devices[first : first + size])
                    parts.append(UnplacedGroup(members, way) if size > 1 else _alone(*members))
                    first += size
                yield tuple(parts)

    # -- one change away --------------------------------------------------------------------------

    def _near(self, order: Order) -> Iterator[Order]:
        """With a stage in another place, or with other devices; what the question allows."""
        question, ends = self.question, self._ends
        used = [device for part in order for device in part.devices]
        spare = [device for device in question.devices if device not in used]
        new = fastest(question.cost, spare, len(used) if question.is_wide else MAX_SPARE)
        places = _other_places(order, private=question.private)
        for one in chain(places, self._other_stages(order, new)):
            devices = {device for part in one for device in part.devices}
            groups = [part for part in one if len(part.devices) > 1 and part not in order]
            permitted = all(question.permit(deals=part.deals) for part in groups)
            at_home = not ends or (one[:1] == ends == one[-1:])
            few = len(one) <= question.cost.unit_count
            if permitted and at_home and few and question.required <= devices:
                yield one

    def _other_stages(self, order: Order, spare: Sequence[int]) -> Iterator[Order]:
        if self._ends and len(order) == 1:
            yield from ((*order, _alone(device), *order) for device in spare)
            return
        if self._ends and len(order) == 3:
            yield order[:1]
        groups = [
            StageGroup(part.devices, (1,) * len(part.devices), part.allocation) for part in order
        ]
        anywhere = tuple(ROOMY * p for p in range(len(order) + 1))
        stages = Draft(self.split, anywhere, tuple(groups), (1,) * len(order))
        for _, parts in regrouped(stages, spare, self.question):
            yield tuple(UnplacedGroup(part.devices, part.allocation) for part in parts)


def _alone(device: int) -> UnplacedGroup:
    return UnplacedGroup((device,))


def _shapes(count: int, pieces: int) -> Iterator[tuple[int, ...]]:
    """Devices of each stage: all ways to join equal pieces, and one or a few apart."""
    pieces = min(count, pieces)
    ends = [count * piece // pieces for piece in range(pieces + 1)]
    for stages in range(1, pieces + 1):
        for cuts in combinations(ends[1:-1], stages - 1):
            yield tuple(end - first for first, end in pairwise((0, *cuts, count)))
    for few in (1, 2, 3):
        if count - few > 1:
            ones = (1,) * few
            yield from ((count - few, *ones), (*ones, count - few))


def _other_places(order: Order, *, private: bool) -> Iterator[Order]:
    """One stage elsewhere, near places first."""
    free = range(1, len(order) - 1) if private else range(len(order))
    pairs = [(p, q) for p in free for q in free if p != q and q != p - 1]
    for p, q in sorted(pairs, key=lambda pair: abs(pair[0] - pair[1])):
        rest = [*order[:p], *order[p + 1 :]]
        rest.insert(q, order[p])
        yield tuple(rest)


def by_length(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """Orders of the same length together."""
    for length in sorted({len(order) for order in orders}):
        yield [order for order in orders if len(order) == length]


def inner_devices(question: Question) -> tuple[int, ...]:
    """Devices that may have a stage which is not pinned to the holder."""
    home = {question.cost.holder} if question.private else set[int]()
    return tuple(device for device in question.devices if device not in home)


def count_placements(question: Question) -> int:
    """How many `every_placement` gives."""
    units, devices = question.cost.unit_count, len(inner_devices(question))
    ends = 2 if question.private else 0
    return sum(perm(devices, n) * comb(units - 1, n + ends - 1) for n in range(1, devices + 1))


def every_placement(question: Question) -> Iterator[DevicePlacement]:
    """All straight pipelines over all subsets and orders of the devices."""
    units, inner = question.cost.unit_count, inner_devices(question)
    holder = (question.cost.holder,) if question.private else ()
    # Each stage has a unit at least: where more devices are in a row, none is left for some.
    for n in range(1, min(len(inner), units - 2 * len(holder)) + 1):
        for middle in permutations(inner, n):
            devices = (*holder, *middle, *holder)
            for cuts in combinations(range(1, units), len(devices) - 1):
                yield (0, *cuts, units), devices
