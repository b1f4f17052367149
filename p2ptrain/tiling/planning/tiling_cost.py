"""What groups of tiled units cost, group by group, in seconds.

For units [s, e) as one group, tile t of device d, slowdown k(d), link of R bytes a second and
latency L; m, b, c: the processor's seconds for a message, for a byte, and to copy a byte:

    work        c(d) = k(d) x sum over its tiles and units of the unit's seconds x (flops of the
                tile's required outputs / flops of all): what neighbours compute too counts twice
    halo        once forward and once back, if any byte crosses between devices:
                L + max over d of max(max(in, out) / R, k(d) (m messages + b bytes)), and 2 c bytes
                for putting the map together; bytes are sent, carried and read at the same time
    statistics  the same for each normalisation, 2 x channels float64 from every tile to all. They
                divide the group's work into legs, each as slow as its slowest device; at the
                beginning of a group they share one exchange with the halo
    group       sum over legs of max over d of the leg's work, plus halos, plus statistics
    filters     once a mini-batch, P bytes of gradients round a ring of D devices, n buckets:
                max( 2 (D - 1) (P / (D R) + L),  4 (D - 1) k (n m + P b / D) )
    ends        once a mini-batch, images in, last maps and gradients out, device after device

Rama et al., sections 4.1, 4.2, 5.1 and figure 4; statistics are ours. Groups meet at halos only, so
their costs add up (`grouping.py`). It is an upper bound of `tiling_simulation.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.feature_maps import Operation
from p2ptrain.plan.types.gradient_sums import BucketSizes, ring_seconds, ring_steps
from p2ptrain.tiling.grid import GridError, GroupLayout, TileGrid
from p2ptrain.tiling.planning.tiling_problem import (
    GroupCost,
    Passage,
    Taker,
    TileDevice,
    TileTraffic,
    TilingProblem,
)

STATISTICS_BYTES = 16
"""Two float64 for each channel."""

COPY = 2.0
"""A byte copied takes as long as so many of an update, which reads and writes as memory lets it."""


class Costs:
    """All groups of a problem on one grid; keeps what it has computed."""

    def __init__(
        self,
        problem: TilingProblem,
        devices: Sequence[TileDevice],
        grid: TileGrid,
        device_of_tile: Sequence[int],
        *,
        holder: TileDevice | None = None,
        behind: TileDevice | None = None,
        early: Iterable[int] = (),
    ) -> None:
        """Prepare.

        Args:
            problem: the question.
            devices: in any order.
            grid: of `problem.network`.
            device_of_tile: by tile.
            holder: the device that has the images, with tiles or without; None = the first one.
            behind: the device that computes with the last maps, the same, if it is one
                (`leaving_to`, `returning_from` are for others).
            early: borders of units where halos travel with statistics (`MapNetwork.with_early`).
        """
        if len(device_of_tile) != grid.tiles:
            raise OptionError(f"{grid.tiles} tiles, but {len(device_of_tile)} have a device")
        self.problem, self.devices = problem, tuple(devices)
        self.early = frozenset(early)
        self.grid = grid.over(problem.network.with_early(self.early))
        self.device_of_tile = tuple(device_of_tile)
        self._holder, self._behind = holder or self.devices[0], behind or self.devices[0]
        self._groups: dict[tuple[int, int], GroupCost | None] = {}
        self._refusals: dict[tuple[int, int], GridError] = {}
        self._whole = [
            sum(
                _work(operation) * _area(problem, operation.output)
                for operation in problem.network.operations[unit.first : unit.end]
            )
            for unit in problem.network.units
        ]
        self._unit_of = [
            number
            for number, unit in enumerate(problem.network.units)
            for _ in range(unit.first, unit.end)
        ]

    def with_early(self, early: Iterable[int]) -> Costs:
        """The same question with other early borders."""
        return Costs(
            *(self.problem, self.devices, self.grid, self.device_of_tile),
            holder=self._holder,
            behind=self._behind,
            early=early,
        )

    def group(self, first: int, end: int) -> GroupCost | None:
        """Of units [first, end); None where the grid does not carry them as one group."""
        if (first, end) not in self._groups:
            try:
                laid = GroupLayout(self.grid, first, end)
            except GridError as error:
                self._groups[first, end] = None
                self._refusals[first, end] = error
            else:
                self._groups[first, end] = self._cost(laid)
        return self._groups[first, end]

    def refusal(self, borders: Sequence[int]) -> GridError | None:
        """Why the grid does not carry these groups: of the first that it does not; names units."""
        refused = (group for group in pairwise(borders) if self.group(*group) is None)
        return next((self._refusals[group] for group in refused), None)

    def total(self, borders: Sequence[int]) -> float:
        """Seconds of a mini-batch; infinite where the grid does not carry those groups."""
        groups = [self.group(first, end) for first, end in pairwise(borders)]
        if any(group is None for group in groups):
            return float("inf")
        return self.fixed_seconds + sum(group.seconds for group in groups if group is not None)

    def memory(self, borders: Sequence[int]) -> list[float]:
        """Bytes by device, filters included."""
        groups = [self.group(first, end) for first, end in pairwise(borders)]
        kept = [group.memory for group in groups if group is not None]
        filters = self.problem.filters.trained
        return [filters + sum(parts) for parts in zip(*kept, strict=True)]

    # -- once a mini-batch -----------------------------------------------------------------------

    @property
    def fixed_seconds(self) -> float:
        """What no grouping changes."""
        return self.filter_seconds + self.end_seconds

    @cached_property
    def filter_seconds(self) -> float:
        """Summing the filters' gradients: the ring's time, or its processors' if that is longer."""
        used, link = len({*self.device_of_tile}), self.problem.link
        if used < 2:
            return 0.0
        steps, size = ring_steps(used), self.problem.filters.summed_bytes
        wire = ring_seconds(used, size, link.bytes_per_s, link.latency_s)
        sums = self.problem.sums
        buckets = _buckets(size, BucketSizes.at(link.bytes_per_s))
        each = sums.message_seconds * buckets + sums.byte_seconds * size / used
        slowest = max(self.devices[device].slowdown for device in self.device_of_tile)
        return max(wire, 2 * steps * slowest * each)

    @property
    def end_seconds(self) -> float:
        """Images to the tiles; the last maps to what follows, and their gradients back."""
        return self.entering.seconds + self.leaving.seconds + self.returning.seconds

    @cached_property
    def entering(self) -> Passage:
        """Images to the tiles."""
        return self._passage(self.problem.network.entering, self._holder, to_tiles=True)

    @cached_property
    def leaving(self) -> Passage:
        """The last maps to what follows."""
        return self.leaving_to(Taker(self._behind))

    @cached_property
    def returning(self) -> Passage:
        """Their gradients back."""
        return self.returning_from(Taker(self._behind))

    def leaving_to(self, taker: Taker) -> Passage:
        """The last maps to one of those that go on with them."""
        leaving = self.problem.network.leaving
        return self._passage(leaving, taker.device, taker.part, to_tiles=False)

    def returning_from(self, taker: Taker) -> Passage:
        """Their gradients back."""
        leaving = self.problem.network.leaving
        return self._passage(leaving, taker.device, taker.part, to_tiles=True)

    def _passage(
        self, maps: Sequence[int], end: TileDevice, part: float = 1.0, *, to_tiles: bool
    ) -> Passage:
        """Between all tiles and one device, whose processor handles every byte."""
        overheads = self.problem.overheads
        parts, latency_s = list[tuple[int, float]](), 0.0
        for device, owned in self._owned_bytes(maps).items():
            size = part * owned
            own = self.devices[device].name
            if own == end.name or not size:
                continue
            link = self.problem.between(*((end.name, own) if to_tiles else (own, end.name)))
            processor = overheads.message_seconds + overheads.byte_seconds * size
            parts.append((device, max(size / link.bytes_per_s, end.slowdown * processor)))
            latency_s = max(latency_s, link.latency_s)
        return Passage(tuple(parts), latency_s)

    def _owned_bytes(self, maps: Sequence[int]) -> dict[int, float]:
        """Of these maps, by device with tiles."""
        network, sizes = self.problem.network, dict[int, float]()
        for tile, device in enumerate(self.device_of_tile):
            own = sum(
                network.bytes_per_position((number,)) * self.grid.owned(tile, number).area
                for number in maps
            )
            sizes[device] = sizes.get(device, 0.0) + own * self.problem.samples
        return sizes

    # -- one group -------------------------------------------------------------------------------

    def _cost(self, laid: GroupLayout) -> GroupCost:
        problem, count, network = self.problem, len(self.devices), self.grid.network
        halo, assembling = self._halo(laid), self._assembling(laid)
        forward, backward = [assembling], [list(assembling)]
        kept, statistics = [0.0] * count, []
        work = useful = 0.0
        operations = network.operations_of(laid.group.first, laid.group.end)
        first = network.units[laid.group.first].first
        for number, operation in zip(self._unit_of[first:], operations, strict=False):
            if operation.statistics:
                announced = self._to_all(STATISTICS_BYTES * network.maps[operation.output].channels)
                read = operation.inputs[0]
                if operation is operations[0] and read not in network.entering:
                    halo = self._together(halo, announced)
                else:
                    statistics.append(announced)
                    forward.append([0.0] * count)
                    backward.append([0.0] * count)
            if not laid.is_used(operation.output):
                continue
            made, whole = 0.0, self._whole[number]
            for tile, device in enumerate(self.device_of_tile):
                part = _work(operation) * laid.required(tile, operation.output).area / whole
                slowdown = self.devices[device].slowdown
                forward[-1][device] += slowdown * part * problem.forward[number]
                backward[-1][device] += slowdown * part * problem.backward[number]
                made += part
            seconds = problem.forward[number] + problem.backward[number]
            once = _work(operation) * _area(problem, operation.output) / whole
            work, useful = work + made * seconds, useful + min(made, once) * seconds
            self._keep(laid, number, operation, kept)
        legs = sum(map(max, (*forward, *backward))) + 2 * self.exchange_seconds(halo)
        return GroupCost(
            forward=tuple(tuple(leg) for leg in forward),
            backward=tuple(tuple(leg) for leg in backward),
            halo=halo,
            statistics=tuple(statistics),
            memory=tuple(kept),
            seconds=legs + 2 * sum(map(self.exchange_seconds, statistics)),
            work=work,
            repeated=1.0 - useful / work if work else 0.0,
        )

    def _keep(
        self, laid: GroupLayout, number: int, operation: Operation, kept: list[float]
    ) -> None:
        """Add what each device keeps of one of a unit's maps: its part of it."""
        network = self.problem.network
        unit = network.units[number]
        outputs = [other.output for other in network.operations[unit.first : unit.end]]
        whole = sum(network.maps[n].channels * _area(self.problem, n) for n in outputs)
        size = self.problem.kept_bytes[number] * self.problem.samples / max(whole, 1)
        channels = network.maps[operation.output].channels
        for tile, device in enumerate(self.device_of_tile):
            kept[device] += size * channels * laid.required(tile, operation.output).area

    def _assembling(self, laid: GroupLayout) -> list[float]:
        """Putting maps and their halos together, by device; taking them apart takes as long."""
        network, problem = self.grid.network, self.problem
        each = COPY * problem.overheads.update_byte_seconds * problem.samples
        seconds = [0.0] * len(self.devices)
        for number in {transfer.map for transfer in laid.transfers}:
            size = network.bytes_per_position((number,))
            for tile, device in enumerate(self.device_of_tile):
                area = laid.required(tile, number).area
                seconds[device] += self.devices[device].slowdown * each * size * area
        return seconds

    def _halo(self, laid: GroupLayout) -> TileTraffic:
        count = len(self.devices)
        sent, received = [0.0] * count, [0.0] * count
        waits_for: list[set[int]] = [set() for _ in range(count)]
        for transfer in laid.transfers:
            ends = self.device_of_tile[transfer.sender], self.device_of_tile[transfer.receiver]
            if ends[0] == ends[1]:
                continue
            size = self.problem.network.bytes_per_position((transfer.map,))
            size *= transfer.region.area * self.problem.samples
            sent[ends[0]] += size
            received[ends[1]] += size
            waits_for[ends[1]].add(ends[0])
        waiting = tuple(frozenset(devices) for devices in waits_for)
        announced = Counter(other for devices in waits_for for other in devices)
        messages = tuple(len(waits_for[device]) + announced[device] for device in range(count))
        return TileTraffic(tuple(sent), tuple(received), messages, waiting)

    def _together(self, halo: TileTraffic, announced: TileTraffic) -> TileTraffic:
        """Both in one exchange: where all send to all, halos go in the same messages."""

        def sums(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
            return tuple(a + b for a, b in zip(one, other, strict=True))

        return TileTraffic(
            sums(halo.sent, announced.sent),
            sums(halo.received, announced.received),
            announced.messages,
            tuple(a | b for a, b in zip(halo.waits_for, announced.waits_for, strict=True)),
        )

    def _to_all(self, size: float) -> TileTraffic:
        """Every tile sends `size` bytes to every device."""
        count, tiles = len(self.devices), len(self.device_of_tile)
        held = [self.device_of_tile.count(device) for device in range(count)]
        busy = frozenset(device for device in range(count) if held[device])
        received = tuple(float(size * (tiles - own)) if own else 0.0 for own in held)
        return TileTraffic(
            received,
            received,
            tuple(2 * (len(busy) - 1) if device in busy else 0 for device in range(count)),
            tuple(busy - {device} if device in busy else frozenset() for device in range(count)),
        )

    def exchange_seconds(self, exchange: TileTraffic) -> float:
        """Until every device has everything, if all begin together."""
        if exchange.is_empty:
            return 0.0
        return self.problem.link.latency_s + max(
            self.device_seconds(exchange, device) for device in range(len(self.devices))
        )

    def device_seconds(self, exchange: TileTraffic, device: int) -> float:
        """What it keeps one device busy: its interface or its processor, whichever is slower."""
        wire = max(exchange.sent[device], exchange.received[device])
        wire /= self.problem.link.bytes_per_s
        return max(wire, self.processor_seconds(exchange, device))

    def processor_seconds(self, exchange: TileTraffic, device: int) -> float:
        """What one device's processor has to do with it."""
        overheads = self.problem.overheads
        processor = overheads.message_seconds * exchange.messages[device]
        processor += overheads.byte_seconds * (exchange.sent[device] + exchange.received[device])
        return self.devices[device].slowdown * processor


def _buckets(size: float, sizes: BucketSizes) -> int:
    """In how many the gradients of so many bytes are summed."""
    count, summed = 0, 0
    while summed < size:
        summed += sizes.next_bytes(summed, int(size) - summed)
        count += 1
    return count


def _work(operation: Operation) -> float:
    """Of one position; above zero, so that a unit's time is always some tile's."""
    return max(operation.flops, 1.0)


def _area(problem: TilingProblem, number: int) -> int:
    feature_map = problem.network.maps[number]
    return feature_map.height * feature_map.width
