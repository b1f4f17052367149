"""The best way to tile a model's first units on some devices, and whether to tile at all.

Tried are all grids with a tile a device (the devices in order of their speed, row by row, so that
rows have similar ones), both ways to draw lines and every number of tiled units; each with its
best grouping. What is not tiled is computed by the fastest device alone. Judged is the simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from p2ptrain.errors import PlanError
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.grouping import best_grouping
from p2ptrain.plan.tiling.problem import TileDevice, TilingProblem
from p2ptrain.plan.tiling.shares import Shares, balanced_shares
from p2ptrain.plan.tiling.simulate import lower_bound, simulate
from p2ptrain.tiles.grid import TileGrid


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to run the first units.

    Attributes:
        devices: names, tile by tile in row order; one name = that device computes all, untiled.
        grid: (rows, columns).
        rows, columns: parts of the maps' height and width.
        aligned: how lines are carried from map to map.
        borders: of the groups, in units; () where nothing is tiled.
        seconds: simulated, of all units of the question, those behind the tiles included.
        bound: what no tiling of the tiled units undercuts, the rest included.
        memory_bytes: by tile, of the tiled units alone.
        reason: why this one.
    """

    devices: tuple[str, ...]
    grid: tuple[int, int]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    aligned: bool
    borders: tuple[int, ...]
    seconds: float
    bound: float
    memory_bytes: tuple[float, ...]
    reason: str

    @property
    def is_tiled(self) -> bool:
        """Whether several devices share the maps."""
        return len(self.devices) > 1


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What may be tried: so many units on the fastest devices.

    Attributes:
        rest: seconds of what follows, on the fastest device.
        bound: what none of its grids undercuts, `rest` included.
    """

    problem: TilingProblem
    devices: tuple[TileDevice, ...]
    rest: float
    bound: float


def best_tiling(problem: TilingProblem, devices: Sequence[TileDevice]) -> Tiling:
    """The fastest of all that fit, one device alone among them.

    Raises:
        PlanError: nothing fits, not even one device alone.
    """
    ordered = sorted(devices, key=lambda device: (device.slowdown, device.name))
    best = _alone(problem, ordered)
    reasons: list[str] = []
    for candidate in sorted(_candidates(problem, ordered), key=lambda c: c.bound):
        if best is not None and candidate.bound >= best.seconds:
            break
        for found in _tilings(candidate, reasons):
            if best is None or found.seconds < best.seconds:
                best = found
    if best is None:
        raise PlanError("; ".join(dict.fromkeys(reasons)) or "no device holds the first units")
    return best


def _alone(problem: TilingProblem, ordered: Sequence[TileDevice]) -> Tiling | None:
    needed = _memory_alone(problem)
    fitting = [device for device in ordered if needed <= device.memory_bytes]
    if not fitting:
        return None
    seconds = problem.seconds * fitting[0].slowdown
    why = "one device is fastest" if len(ordered) > 1 else "there is one device"
    return Tiling(
        (fitting[0].name,), (1, 1), (1.0,), (1.0,), True, (), seconds, seconds, (needed,), why
    )


def _memory_alone(problem: TilingProblem) -> float:
    return problem.filter_memory_bytes + sum(problem.kept_bytes) * problem.samples


def _candidates(problem: TilingProblem, ordered: Sequence[TileDevice]) -> Iterator[_Candidate]:
    for count in range(1, len(problem.network.units) + 1):
        tiled = problem.first_units(count)
        rest = (problem.seconds - tiled.seconds) * ordered[0].slowdown
        held = _memory_alone(problem) - _memory_alone(tiled)
        first = replace(ordered[0], memory_bytes=ordered[0].memory_bytes - held)
        for used in range(2, len(ordered) + 1):
            devices = (first, *ordered[1:used])
            bound = lower_bound(tiled, devices, least=used)
            yield _Candidate(tiled, devices, rest, bound + rest)


def _tilings(candidate: _Candidate, reasons: list[str]) -> Iterator[Tiling]:
    """Every grid with a tile a device, lines drawn both ways; adds why others do not fit."""
    used = len(candidate.devices)
    for rows in (r for r in range(1, used + 1) if used % r == 0):
        for aligned in (True, False):
            try:
                yield _tiling(candidate, (rows, used // rows), aligned=aligned)
            except PlanError as error:
                reasons.append(str(error))


def _tiling(candidate: _Candidate, shape: tuple[int, int], *, aligned: bool) -> Tiling:
    """One grid with its best grouping."""
    problem, devices = candidate.problem, candidate.devices
    shares = _shares(problem, devices, shape)
    grid = TileGrid(problem.network, (shares.rows, shares.columns), aligned=aligned)
    costs = Costs(problem, devices, grid, range(len(devices)))
    borders = best_grouping(costs)
    groups, units = len(borders) - 1, len(problem.network.units)
    return Tiling(
        devices=tuple(device.name for device in devices),
        grid=shape,
        rows=shares.rows,
        columns=shares.columns,
        aligned=aligned,
        borders=borders,
        seconds=simulate(costs, borders).seconds + candidate.rest,
        bound=candidate.bound,
        memory_bytes=tuple(costs.memory(borders)),
        reason=f"{units} units in {groups} groups on {shape[0]}x{shape[1]} tiles",
    )


def _shares(
    problem: TilingProblem, devices: Sequence[TileDevice], shape: tuple[int, int]
) -> Shares:
    maps = sum(problem.kept_bytes) * problem.samples
    caps = [
        min(max(device.memory_bytes - problem.filter_memory_bytes, 0.0) / max(maps, 1.0), 1.0)
        for device in devices
    ]
    if min(caps) <= 0:
        small = next(d for d, cap in zip(devices, caps, strict=True) if cap <= 0)
        raise PlanError(f"{small.name} holds no tile: filters, and what follows, fill its memory")
    speeds = [1.0 / device.slowdown for device in devices]
    return balanced_shares(_table(speeds, shape), _table(caps, shape))


def _table(values: Sequence[float], shape: tuple[int, int]) -> list[list[float]]:
    rows, columns = shape
    return [list(values[r * columns : (r + 1) * columns]) for r in range(rows)]
