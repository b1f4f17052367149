r"""What orders of stages are worth while they are compared: `order_cuts`, on a few cuts, shared.

Orders near each other end alike, so the programme is kept as a tree of suffixes: what a suffix is
worth at every first unit is computed once, and the suffixes of one length, whatever order needs
them, are one array operation. No borders are kept, and half the precision is enough.

    a b c d  \
    b a c d   >  (c d) once, then (b c d) and (a c d), then both orders
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from p2ptrain.plan.replan.order_cuts import Order, OrderCuts, Singles, Wholes, stacked
from p2ptrain.plan.search.balanced_groups import UnplacedGroup


class OrderValues:
    """Values orders of one question; symbols as in `cuts`, N suffixes.

    Arguments:
        cuts: of the places where cuts may lie.
        weights: what a last stage's time may count for; an order has the best of them.
    """

    def __init__(self, cuts: OrderCuts, weights: Sequence[float]) -> None:
        self._cuts, self._weights = cuts, np.array(weights, dtype=np.float32)
        self._carried = cuts.carried.astype(np.float32)
        self._tables = _StackedTables(cuts)
        self._rows: dict[tuple[int, int], int] = {}  # (row behind, part) -> row; ~weight ends all
        self._heads: list[int] = []  # [N] part
        empty = np.zeros((0, len(self._carried)), dtype=np.float32)
        self._value, self._latency, self._last = empty, empty, empty  # [N, C]

    def of(self, orders: Sequence[Order]) -> list[float]:
        """Round seconds of each by value; inf = impossible."""
        new: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        ends = [self._row(order, w, new) for order in orders for w in range(len(self._weights))]
        self._tables.stack()
        self._grow()
        for depth in sorted(new):
            rows, behind, k = np.array(new[depth]).T
            if depth == 0:
                self._end(rows, ~behind, k)
            else:
                self._extend(rows, behind, k)
        value = self._value[ends, 0].reshape(len(orders), -1).min(axis=1)
        return self._fed(value, orders)

    def _row(self, order: Order, weight: int, new: dict[int, list[tuple[int, int, int]]]) -> int:
        """The order's row; the suffixes that were not known are put into `new` by length."""
        row = ~weight
        for depth, part in enumerate(reversed(order)):
            k = self._tables.number(part)
            key = row, k
            if key not in self._rows:
                self._rows[key] = len(self._heads)
                new[depth].append((len(self._heads), row, k))
                self._heads.append(k)
            row = self._rows[key]
        return row

    def _grow(self) -> None:
        missing = len(self._heads) - len(self._value)
        more = np.zeros((missing, len(self._carried)), dtype=np.float32)
        self._value = np.concatenate((self._value, more))
        self._latency = np.concatenate((self._latency, more))
        self._last = np.concatenate((self._last, more))

    def _end(self, rows: Wholes, weight: Wholes, k: Wholes) -> None:
        """Last stages: all units from each first one."""
        tables = self._tables
        last = tables.seconds[-1, k]
        value = np.maximum(tables.busy[-1, k], last * tables.trips[-1, k])
        self._value[rows] = value * self._weights[weight][:, None]
        self._latency[rows] = self._last[rows] = last

    def _extend(self, rows: Wholes, behind: Wholes, k: Wholes) -> None:
        """A stage of part k before each suffix."""
        tables, value = self._tables, self._value[behind]
        after = np.array(self._heads)[behind]
        there, back, delay = tables.hops(k, after)
        hop = (there + back) * self._carried + delay  # [B, C]
        carried = np.maximum(there, back) * self._carried * np.float32(self._cuts.rounds)
        total = tables.seconds.take(k, axis=1)  # [C, B, C] by cut and first unit
        around = None
        if tables.forced:
            around = total + (hop + self._latency[behind]).T[:, :, None]
        total += (hop + np.maximum(value, carried)).T[:, :, None]
        np.maximum(total, self._busy(behind, k), out=total)
        if around is None and not self._cuts.private:
            self._value[rows] = total.min(axis=0)
            return
        if around is not None:
            np.maximum(total, around * tables.trips.take(k, axis=1), out=total)
        cut = total.argmin(axis=0)  # [B, C]
        b, first = np.arange(len(rows))[:, None], np.arange(len(self._carried))
        self._value[rows] = total[cut, b, first]
        self._latency[rows] = (
            tables.seconds[cut, k[:, None], first] + ((hop + self._latency[behind])[b, cut])
        )
        self._last[rows] = self._last[behind][b, cut]

    def _busy(self, behind: Wholes, k: Wholes) -> Singles:
        """[C, B, C]; a private plan's first stage has its device's last stage to do too."""
        busy = self._tables.busy.take(k, axis=1)
        if self._cuts.private:
            holder = np.flatnonzero(k == self._tables.holder)
            also = self._last[behind[holder]] * np.float32(self._cuts.rounds)
            busy[:, holder] += also.T[:, :, None]
        return busy

    def _fed(self, value: Singles, orders: Sequence[Order]) -> list[float]:
        """As `cuts`: with the holder's inputs and targets."""
        sizes, rounds = self._cuts.cost.profile, self._cuts.rounds
        fed = []
        for seconds, order in zip(value.tolist(), orders, strict=True):
            busy, delay = self._cuts.feed(order[0], sizes.input_bytes)
            target, _ = self._cuts.feed(order[-1], sizes.target_bytes)
            turn = max(busy + target, (busy + delay) / 2)
            fed.append(max(busy + delay + seconds, turn * rounds))
        return fed


class _StackedTables:
    """The parts' tables on the cut places, side by side; parts come in as orders name them.

    Attributes:
        seconds, busy, trips: [C, K, C] by cut, part and first unit, as in `cuts`.
        forced: some part's memory forces more than one trip.
        holder: the number of the holder alone, -1 = no order has it.
    """

    def __init__(self, cuts: OrderCuts) -> None:
        self._cuts = cuts
        self._parts: dict[UnplacedGroup, int] = {}
        self._alone = UnplacedGroup((cuts.cost.holder,))
        self._hops: Singles = np.zeros((0, 0, 3), dtype=np.float32)
        self.seconds = self.busy = self.trips = np.zeros((0, 0, 0), dtype=np.float32)
        self.forced, self.holder = False, -1

    def number(self, part: UnplacedGroup) -> int:
        """The part's place in the arrays, after the next `stack`."""
        return self._parts.setdefault(part, len(self._parts))

    def stack(self) -> None:
        """Take in the parts that are new."""
        known = self.seconds.shape[1]
        if known == len(self._parts):
            return
        self.holder = self._parts.get(self._alone, -1)
        new = [self._cuts.tables(part) for part in list(self._parts)[known:]]
        seconds, reduce, trips = (
            stacked(tables)
            for tables in zip(*((t.seconds, t.reduce, t.trips) for t in new), strict=True)
        )
        busy = seconds * np.float32(self._cuts.rounds) + reduce
        self.forced |= bool((trips[np.isfinite(seconds)] > 1).any())
        if known:
            seconds = np.concatenate((self.seconds, seconds), axis=1)
            busy = np.concatenate((self.busy, busy), axis=1)
            trips = np.concatenate((self.trips, trips), axis=1)
        self.seconds, self.busy, self.trips = seconds, busy, trips
        count = len(self._parts)
        hops = np.full((count, count, 3), np.nan, dtype=np.float32)
        hops[:known, :known] = self._hops
        self._hops = hops

    def hops(self, before: Wholes, after: Wholes) -> tuple[Singles, Singles, Singles]:
        """[B, 1] each, as `OrderCuts.hop`."""
        parts = list(self._parts)
        unknown = np.isnan(self._hops[before, after, 0])
        for a, b in {*zip(before[unknown].tolist(), after[unknown].tolist(), strict=True)}:
            self._hops[a, b] = self._cuts.hop(parts[a], parts[b])
        there, back, delay = self._hops[before, after].T[:, :, None]
        return there, back, delay
