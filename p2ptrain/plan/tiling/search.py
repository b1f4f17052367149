"""The best way to tile a model's first units on some devices, and whether to tile at all.

Tried are all grids with a tile a device (the devices in order of their speed, row by row, so that
rows have similar ones), both ways to draw lines and every number of tiled units; each with its
best grouping. What is not tiled is computed by the fastest device alone, or by others
(`pipelined.py`). Judged is the simulation.
A grid that is asked for may have more tiles than there are devices: then each has several, the more
the faster it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf

from p2ptrain.errors import PlanError
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.grouping import best_grouping, early_borders
from p2ptrain.plan.tiling.problem import TileDevice, TilingProblem
from p2ptrain.plan.tiling.shares import Shares, balanced_shares
from p2ptrain.plan.tiling.simulate import lower_bound, simulate
from p2ptrain.tiles.grid import GroupLayout, TileGrid
from p2ptrain.tiles.shape import owners


@dataclass(frozen=True, slots=True)
class Asked:
    """What stands around the tiles, and what was asked for.

    Attributes:
        grid: (rows, columns); None = what is best.
        borders: of the groups; () = what is best.
        every: all devices have tiles; one alone does not count.
        below: seconds; nothing slower is wanted.
        pieces: micro-batches of a mini-batch; the question is about one of them.
        holder: name of the device that has the images; "" = the fastest.
        tail_seconds: of what cannot be tiled, on the fastest device, a micro-batch.
        tail_bytes: what that takes of its memory.
    """

    grid: tuple[int, int] | None = None
    borders: tuple[int, ...] = ()
    every: bool = False
    below: float = inf
    pieces: int = 1
    holder: str = ""
    tail_seconds: float = 0.0
    tail_bytes: float = 0.0


NOTHING = Asked()


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to run the first units.

    Attributes:
        devices: names, in the order of their tiles; one name = that device computes all, untiled.
        shares: tiles of each, in row order.
        grid: (rows, columns).
        rows, columns: parts of the maps' height and width.
        aligned: how lines are carried from map to map.
        borders: of the groups, in units; () where nothing is tiled.
        early: those of them where halos travel with statistics, ascending.
        seconds: simulated, of a mini-batch, what is behind the tiles included.
        bound: what no tiling of the tiled units undercuts, the rest included.
        memory_bytes: by device, of the tiled units alone.
        reason: why this one.
    """

    devices: tuple[str, ...]
    shares: tuple[int, ...]
    grid: tuple[int, int]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    aligned: bool
    borders: tuple[int, ...]
    seconds: float
    bound: float
    memory_bytes: tuple[float, ...]
    reason: str
    early: tuple[int, ...] = ()

    @property
    def is_tiled(self) -> bool:
        """Whether several devices share the maps."""
        return len(self.devices) > 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be tried: so many units on some devices.

    Attributes:
        devices: in the order of their tiles.
        whole: seconds of a mini-batch, of the tiles in these groups and of all that follows;
            infinite where it does not fit the memory.
        bound: what none of its grids undercuts, the same.
        is_behind_first: what follows is on the first device; else on one without tiles.
    """

    problem: TilingProblem
    devices: tuple[TileDevice, ...]
    whole: Callable[[Costs, tuple[int, ...]], float]
    bound: float
    is_behind_first: bool = True


def best_tiling(
    problem: TilingProblem, devices: Sequence[TileDevice], asked: Asked = NOTHING
) -> Tiling:
    """The fastest of all that fit, one device alone among them.

    Raises:
        PlanError: nothing fits, not even one device alone; nothing is below the seconds asked for.
    """
    ordered = sorted(devices, key=lambda device: (device.slowdown, device.name))
    alone = None if asked.every or asked.grid else _alone(problem, ordered, asked)
    reasons: list[str] = []
    best = best_of(_candidates(problem, ordered, asked), asked, reasons, alone)
    if best is None:
        raise PlanError("; ".join(dict.fromkeys(reasons)) or "no device holds the first units")
    return best


def best_of(
    candidates: Iterable[Candidate],
    asked: Asked,
    reasons: list[str],
    best: Tiling | None = None,
) -> Tiling | None:
    """The fastest of `best` and what is below the seconds asked for; adds why others do not fit."""
    for candidate in sorted(candidates, key=lambda c: c.bound):
        if candidate.bound >= (asked.below if best is None else best.seconds):
            break
        for found in _tilings(candidate, asked, reasons):
            if found.seconds < (asked.below if best is None else best.seconds):
                best = found
    return best


def _alone(problem: TilingProblem, ordered: Sequence[TileDevice], asked: Asked) -> Tiling | None:
    needed = _memory_alone(problem) + asked.tail_bytes
    fitting = [device for device in ordered if needed <= device.memory_bytes]
    if not fitting:
        return None
    seconds = asked.pieces * (problem.seconds + asked.tail_seconds) * fitting[0].slowdown
    if seconds >= asked.below:
        return None
    why = "one device is fastest" if len(ordered) > 1 else "there is one device"
    return Tiling(
        (fitting[0].name,), (1,), (1, 1), (1.0,), (1.0,), True, (), seconds, seconds, (needed,), why
    )


def _memory_alone(problem: TilingProblem) -> float:
    return problem.filter_memory_bytes + sum(problem.kept_bytes) * problem.samples


def _candidates(
    problem: TilingProblem, ordered: Sequence[TileDevice], asked: Asked
) -> Iterator[Candidate]:
    for count in unit_counts(problem, asked):
        tiled = problem.first_units(count)
        rest = (problem.seconds - tiled.seconds + asked.tail_seconds) * ordered[0].slowdown
        held = _memory_alone(problem) - _memory_alone(tiled) + asked.tail_bytes
        first = replace(ordered[0], memory_bytes=ordered[0].memory_bytes - held)
        for used in _device_counts(len(ordered), asked):
            devices = (first, *ordered[1:used])
            bound = lower_bound(tiled, devices, least=used, pieces=asked.pieces, messages=True)
            whole = partial(_one_after_the_other, rest, asked.pieces)
            yield Candidate(tiled, devices, whole, bound + asked.pieces * rest)


def unit_counts(problem: TilingProblem, asked: Asked) -> Sequence[int]:
    """How many units may be tiled."""
    return [asked.borders[-1]] if asked.borders else range(1, len(problem.network.units) + 1)


def _one_after_the_other(rest: float, pieces: int, costs: Costs, borders: tuple[int, ...]) -> float:
    """Seconds of a mini-batch: each micro-batch through the tiles and then `rest`, alone."""
    once = costs.filter_seconds
    return pieces * (simulate(costs, borders).seconds - once + rest) + once


def _device_counts(count: int, asked: Asked) -> Sequence[int]:
    if asked.grid is not None:
        return [min(asked.grid[0] * asked.grid[1], count)]
    return [count] if asked.every else range(2, count + 1)


def _tilings(candidate: Candidate, asked: Asked, reasons: list[str]) -> Iterator[Tiling]:
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
                reasons.append(str(error))


def _tiling(candidate: Candidate, asked: Asked, shape: tuple[int, int], *, aligned: bool) -> Tiling:
    """One grid with its best grouping, or the one that is asked for."""
    problem, devices = candidate.problem, candidate.devices
    counts = tiles_by_speed(shape[0] * shape[1], [device.slowdown for device in devices])
    shares = _shares(problem, devices, counts, shape)
    grid = TileGrid(problem.network, (shares.rows, shares.columns), aligned=aligned)
    names = [device.name for device in devices]
    holder = names.index(asked.holder) if asked.holder in names else -1 if asked.holder else 0
    behind = 0 if candidate.is_behind_first else -1
    plain = Costs(problem, devices, grid, owners(counts), holder=holder, behind=behind)
    costs = plain.with_early(early_borders(plain))
    borders = _checked(costs, asked.borders) if asked.borders else best_grouping(costs)
    groups, units = len(borders) - 1, len(problem.network.units)
    return Tiling(
        devices=tuple(names),
        shares=counts,
        grid=shape,
        rows=shares.rows,
        columns=shares.columns,
        aligned=aligned,
        borders=borders,
        seconds=candidate.whole(costs, borders),
        bound=candidate.bound,
        memory_bytes=tuple(costs.memory(borders)),
        reason=f"{units} units in {groups} groups on {shape[0]}x{shape[1]} tiles",
        early=tuple(border for border in borders[1:-1] if border in costs.early),
    )


def _checked(costs: Costs, borders: tuple[int, ...]) -> tuple[int, ...]:
    """Groups that were asked for. Raises PlanError: the grid, or memory, does not carry them."""
    for first, end in pairwise(borders):
        GroupLayout(costs.grid, first, end)
    for device, needed in zip(costs.devices, costs.memory(borders), strict=True):
        if needed > device.memory_bytes:
            raise PlanError(
                f"{device.name} needs {needed / 2**20:.1f} MiB for its tiles in these groups and "
                f"has {device.memory_bytes / 2**20:.1f}"
            )
    return borders


def tiles_by_speed(tiles: int, slowdowns: Sequence[float]) -> tuple[int, ...]:
    """How many tiles each device gets, at least one: always one more where it is done first."""
    counts = [1] * len(slowdowns)
    for _ in range(tiles - len(counts)):
        done = [(count + 1) * slow for count, slow in zip(counts, slowdowns, strict=True)]
        counts[done.index(min(done))] += 1
    return tuple(counts)


def _shares(
    problem: TilingProblem,
    devices: Sequence[TileDevice],
    counts: Sequence[int],
    shape: tuple[int, int],
) -> Shares:
    """Lines by the speed, and within the memory, that each tile's device has for it."""
    maps = sum(problem.kept_bytes) * problem.samples
    caps, speeds = [], []
    for device, count in zip(devices, counts, strict=True):
        free = max(device.memory_bytes - problem.filter_memory_bytes, 0.0)
        if free <= 0:
            raise PlanError(
                f"{device.name} holds no tile: filters, and what follows, fill its memory"
            )
        caps += [min(free / max(maps, 1.0) / count, 1.0)] * count
        speeds += [1.0 / device.slowdown / count] * count
    return balanced_shares(_table(speeds, shape), _table(caps, shape))


def _table(values: Sequence[float], shape: tuple[int, int]) -> list[list[float]]:
    rows, columns = shape
    return [list(values[r * columns : (r + 1) * columns]) for r in range(rows)]
