"""The best way to tile a model's first units on some devices.

Tried are all grids with a tile a device (the devices in order of their speed, row by row, so that
rows have similar ones), both ways to draw lines and every number of tiled units; each with its
best grouping. What is not tiled is computed by one of these devices (of those that can hold it, the
fastest or the one with most memory) or by others (`pipelined_tiling.py`). The simulation decides.

Lines are drawn within what devices can hold of the maps. Halos come on top, and lines lie between
positions: where a tile is then too large, they are drawn again with less for it. A grid that is
asked for may have more tiles than there are devices: then faster devices get more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from p2ptrain.errors import PlanError, size_text
from p2ptrain.plan.types.allocation import owners
from p2ptrain.tiling.grid import GroupLayout, TileGrid
from p2ptrain.tiling.planning.grouping import TilesTooLarge, best_grouping, early_borders
from p2ptrain.tiling.planning.tile_shares import Shares, balanced_shares
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import NothingFits, NoTile, TileDevice, TilingProblem
from p2ptrain.tiling.planning.tiling_setting import Rest, Tiling, TilingCandidate, TilingRequest
from p2ptrain.tiling.planning.tiling_simulation import lower_bound

MAX_DRAWINGS = 6
"""Of a grid's lines, where memory bounds them."""

MIN_REDUCTION, MAX_REDUCTION = 0.01, 0.5
"""Of a tile that was too large; the least doubles each time, as lines move by whole positions."""


def best_tiling(
    problem: TilingProblem,
    devices: Sequence[TileDevice],
    asked: TilingRequest,
    rest: Rest,
    holder: TileDevice | None = None,
) -> Tiling:
    """The fastest of all that fit; `holder`: the device that has the images, or the fastest.

    Raises:
        NothingFits: or nothing is below the seconds asked for.
    """
    ordered = sorted(devices, key=lambda device: (device.slowdown, device.name))
    reasons: list[PlanError] = []
    found = _candidates(problem, ordered, asked, rest)
    best = best_of((replace(one, holder=holder) for one in found), asked, reasons)
    if best is None:
        raise NothingFits(reasons or [PlanError("no device has the memory for the first layers")])
    return best


def best_of(
    candidates: Iterable[TilingCandidate], asked: TilingRequest, reasons: list[PlanError]
) -> Tiling | None:
    """The fastest of what is below the seconds asked for; adds why others do not fit."""
    best: Tiling | None = None
    for candidate in sorted(candidates, key=lambda c: c.bound):
        if candidate.bound >= (asked.below if best is None else best.seconds):
            break
        for found in _tilings(candidate, asked, reasons):
            if found.seconds < (asked.below if best is None else best.seconds):
                best = found
    return best


def _candidates(
    problem: TilingProblem, ordered: Sequence[TileDevice], asked: TilingRequest, rest: Rest
) -> Iterator[TilingCandidate]:
    of = {used: problem.among(ordered[:used]) for used in _device_counts(len(ordered), asked)}
    for count in unit_counts(problem, asked):
        held = rest.held_bytes(count)
        for used, whole in of.items():
            tiled, devices = whole.first_units(count), ordered[:used]
            least = lower_bound(tiled, devices, least=used, pieces=asked.pieces, messages=True)
            for behind in _rests(tiled, devices, held, partial(rest.alone, units=count)):
                yield TilingCandidate(
                    problem=tiled,
                    devices=tuple(_less(device, behind, held) for device in devices),
                    whole=partial(rest.whole, behind),
                    bound=least + rest.alone(behind, count),
                    behind=behind,
                )


def _rests(
    tiled: TilingProblem,
    devices: Sequence[TileDevice],
    held_bytes: float,
    seconds: Callable[[TileDevice], float],
) -> Sequence[TileDevice]:
    """Who may have the rest: of those that hold it beside filters the fastest, and the largest."""
    needed = held_bytes + tiled.filters.trained
    fitting = [device for device in devices if needed < device.memory_bytes]
    if not fitting:
        return devices[:1]  # which says why
    fastest = min(fitting, key=lambda device: (seconds(device), device.name))
    largest = max(fitting, key=lambda device: device.memory_bytes)
    return [fastest, largest] if largest.memory_bytes > fastest.memory_bytes else [fastest]


def _less(device: TileDevice, behind: TileDevice, held_bytes: float) -> TileDevice:
    """With what it has for its tiles beside the rest, if that is its own."""
    if device.name != behind.name:
        return device
    return replace(device, memory_bytes=device.memory_bytes - held_bytes)


def unit_counts(problem: TilingProblem, asked: TilingRequest) -> Sequence[int]:
    """How many units may be tiled."""
    network = problem.network
    return [asked.borders[-1]] if asked.borders else range(network.least, len(network.units) + 1)


def _device_counts(count: int, asked: TilingRequest) -> Sequence[int]:
    if asked.grid is not None:
        return [min(asked.grid[0] * asked.grid[1], count)]
    return [count] if asked.every else range(2, count + 1)


def _tilings(
    candidate: TilingCandidate, asked: TilingRequest, reasons: list[PlanError]
) -> Iterator[Tiling]:
    """Every grid with a tile a device, lines drawn both ways; adds why others do not fit."""
    used, network = len(candidate.devices), candidate.problem.network
    shapes = [(rows, used // rows) for rows in range(1, used + 1) if used % rows == 0]
    if all(feature_map.height == feature_map.width for feature_map in network.maps):
        shapes = [shape for shape in shapes if shape[0] <= shape[1]]  # as good as turned round
    for shape in [asked.grid] if asked.grid is not None else shapes:
        for aligned in (True, False):
            try:
                yield _tiling(candidate, asked, shape, aligned=aligned)
            except PlanError as error:
                reasons.append(error)


def _tiling(
    candidate: TilingCandidate, asked: TilingRequest, shape: tuple[int, int], *, aligned: bool
) -> Tiling:
    """One grid with its best grouping, or the one that is asked for."""
    problem, devices = candidate.problem, candidate.devices
    counts = tiles_by_speed(shape[0] * shape[1], [device.slowdown for device in devices])
    caps = _caps(candidate, counts)
    refusal: PlanError | None = None
    for drawing in range(MAX_DRAWINGS):
        try:
            shares = _shares(devices, counts, caps, shape)
        except PlanError as error:
            raise refusal or error from None
        grid = TileGrid(problem.network, (shares.rows, shares.columns), aligned=aligned)
        try:
            costs, borders = _grouped(candidate, asked, grid, counts)
        except TilesTooLarge as error:
            refusal = refusal or error
            caps = _lower(caps, candidate, counts, shares, error.needed, MIN_REDUCTION * 2**drawing)
        else:
            return _described(candidate, costs, borders, shares, counts, aligned=aligned)
    assert refusal is not None
    raise refusal


def _grouped(
    candidate: TilingCandidate, asked: TilingRequest, grid: TileGrid, counts: Sequence[int]
) -> tuple[Costs, tuple[int, ...]]:
    """What these tiles cost, and the borders of their groups. Raises as `best_grouping`."""
    plain = Costs(
        *(candidate.problem, candidate.devices, grid, owners(counts)),
        holder=candidate.holder,
        behind=candidate.behind,
    )
    costs = plain.with_early(early_borders(plain))
    return costs, _checked(costs, asked.borders) if asked.borders else best_grouping(costs)


def _described(
    candidate: TilingCandidate,
    costs: Costs,
    borders: tuple[int, ...],
    shares: Shares,
    counts: tuple[int, ...],
    *,
    aligned: bool,
) -> Tiling:
    return Tiling(
        devices=tuple(device.name for device in candidate.devices),
        shares=counts,
        grid=costs.grid.shape,
        rows=shares.rows,
        columns=shares.columns,
        aligned=aligned,
        borders=borders,
        rest=candidate.whole(costs, borders),
        bound=candidate.bound,
        memory_bytes=tuple(costs.memory(borders)),
        early=tuple(border for border in borders[1:-1] if border in costs.early),
    )


def _checked(costs: Costs, borders: tuple[int, ...]) -> tuple[int, ...]:
    """Groups that were asked for.

    Raises:
        TilesTooLarge: memory does not hold them.
        PlanError: the grid does not carry them.
    """
    for first, end in pairwise(borders):
        GroupLayout(costs.grid, first, end)
    memory = costs.memory(borders)
    for device, needed in zip(costs.devices, memory, strict=True):
        if needed > device.memory_bytes:
            raise TilesTooLarge(
                f"{device.name} needs {size_text(needed)} for its tiles in these groups and has "
                f"{size_text(device.memory_bytes)}",
                memory,
            )
    return borders


def tiles_by_speed(tiles: int, slowdowns: Sequence[float]) -> tuple[int, ...]:
    """How many tiles each device gets, at least one: always one more where it is done first."""
    counts = [1] * len(slowdowns)
    for _ in range(tiles - len(counts)):
        done = [(count + 1) * slow for count, slow in zip(counts, slowdowns, strict=True)]
        counts[done.index(min(done))] += 1
    return tuple(counts)


def _caps(candidate: TilingCandidate, counts: Sequence[int]) -> list[float]:
    """The largest part of the maps that each tile may have, as far as its device's memory goes."""
    problem, behind, caps = candidate.problem, candidate.behind, list[float]()
    for device, count in zip(candidate.devices, counts, strict=True):
        free = device.memory_bytes - problem.filters.trained
        if free <= 0:
            offered = (behind if device.name == behind.name else device).memory_bytes
            raise NoTile(device.name, offered - free, offered)
        caps += [min(free / _maps_bytes(problem) / count, 1.0)] * count
    return caps


def _lower(
    caps: Sequence[float],
    candidate: TilingCandidate,
    counts: Sequence[int],
    shares: Shares,
    needed: Sequence[float],
    least: float,
) -> list[float]:
    """Less for the tiles of devices that these lines gave too much: by what they lack.

    Args:
        needed: bytes by device, filters included.
        least: part of a tile that goes at least.
    """
    areas = [row * column for row in shares.rows for column in shares.columns]
    lower = list(caps)
    first = 0
    for device, count, bytes_ in zip(candidate.devices, counts, needed, strict=True):
        tiles = range(first, first + count)
        first += count
        missing = (bytes_ - device.memory_bytes) / _maps_bytes(candidate.problem)
        if missing <= 0:
            continue
        less = missing / sum(areas[tile] for tile in tiles)
        for tile in tiles:
            lower[tile] = areas[tile] * (1.0 - min(max(less, least), MAX_REDUCTION))
    return lower


def _maps_bytes(problem: TilingProblem) -> float:
    """Of all maps, whole."""
    return max(sum(problem.kept_bytes) * problem.samples, 1.0)


def _shares(
    devices: Sequence[TileDevice],
    counts: Sequence[int],
    caps: Sequence[float],
    shape: tuple[int, int],
) -> Shares:
    """Lines by the speed that each tile's device has for it, within `caps`, by tile."""
    speeds: list[float] = []
    for device, count in zip(devices, counts, strict=True):
        speeds += [1.0 / device.slowdown / count] * count
    return balanced_shares(_table(speeds, shape), _table(caps, shape))


def _table(values: Sequence[float], shape: tuple[int, int]) -> list[list[float]]:
    rows, columns = shape
    return [list(values[r * columns : (r + 1) * columns]) for r in range(rows)]
