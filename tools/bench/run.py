"""Measures cells one after the other, round robin over repeats, and keeps each figure at once.

    for each repeat, household and model: what the devices reach alone (every quarter of an hour),
                                          then every system, one after the other

Systems alternate within a repeat, so that a machine that others slow down for a while slows all
systems, and not one of them in all its runs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from tools.bench import alone, rivals
from tools.bench.cells import WARM, Cell, Place, rounds_of
from tools.bench.household_run import HouseholdRuns
from tools.bench.processes import CellError
from tools.bench.results import Results, age_seconds, machine, now, versions
from tools.testbed import Household, Testbed


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to measure.

    Attributes:
        repeat: runs of each cell; the median counts.
        again: measure cells that the file has already.
        limit_seconds: of one run, or of one measurement of the devices.
        steady_rounds: that count.
        settle_rounds: of p2ptrain, before those.
        reference_seconds: how long the devices' speeds alone hold; then they are measured again,
            as a machine that others use changes from hour to hour.
        train_options: more of them for `p2ptrain train`, such as a fixed micro-batch.
        rate: of all cables, as `tc` writes it, instead of each household's own.
    """

    repeat: int = 1
    again: bool = False
    limit_seconds: float = 300.0
    steady_rounds: int = 4
    settle_rounds: int = WARM
    reference_seconds: float = 300.0
    train_options: tuple[str, ...] = ()
    rate: str | None = None


class Bench:
    """Fills the results' file."""

    def __init__(self, results: Results, wishes: Wishes, states: Path) -> None:
        self._results = results
        self._wishes = wishes
        self._states = states

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure every cell that still lacks runs."""
        if self._wishes.again:
            for cell in cells:
                self._results.forget(cell.key)
        for key, value in {**versions(), "at": now()}.items():
            self._results.put("versions", key, value)
        for key, value in machine().items():
            self._results.put("machine", key, value)
        for number in range(self._wishes.repeat):
            for cell in cells:
                if self._results.runs_missing(cell.key, number + 1):
                    self._measure(cell)

    def _measure(self, cell: Cell) -> None:
        speeds = self._alone(cell.place)
        if speeds is None:
            return
        begin = monotonic()
        reference = {"aggregate": alone.aggregate(speeds, cell.batch_size), "at": now()}
        try:
            run = {**self._run(cell, speeds), **reference}
        except CellError as error:
            run = {"error": str(error), "at": now()}
        self._results.add_run(cell.key, run)
        _tell(f"{cell.key}: {_line(run)} ({monotonic() - begin:.0f} s)")

    def _run(self, cell: Cell, speeds: dict[str, Any]) -> dict[str, Any]:
        rounds = rounds_of(cell, self._wishes.steady_rounds, self._wishes.settle_rounds)
        limit = self._wishes.limit_seconds
        with self._testbed(cell.household) as testbed:
            if cell.is_rival:
                own = alone.speeds(speeds)
                chosen = self._results.chosen(cell.key)
                return rivals.Rivals(testbed, own, limit, chosen).run(cell, rounds)
            folder = self._states / cell.household
            runs = HouseholdRuns(testbed, folder, limit, self._wishes.train_options)
            return runs.run(cell, rounds)

    def _alone(self, place: Place) -> dict[str, Any] | None:
        """What the devices reach alone, unless it is known of late; None where it fails."""
        kept: dict[str, Any] | None = self._results.get("alone", place.key)
        holds_seconds = self._wishes.reference_seconds
        if kept is not None and age_seconds(kept["measured_at"]) <= holds_seconds:
            return kept
        _tell(f"{place.key}: measuring the devices")
        before = None if self._wishes.again else kept
        try:
            with self._testbed(place.household) as testbed:
                measured = alone.measure(place, testbed, self._wishes.limit_seconds, before)
        except CellError as error:
            _tell(f"{place.key}: not measured: {error}")
            return None
        kept = {"measured_at": now(), **measured}
        self._results.put("alone", place.key, kept)
        return kept

    def _testbed(self, name: str) -> Testbed:
        household = Household.load(name)
        if self._wishes.rate is not None:
            household = household.at_rate(self._wishes.rate)
        devices = [
            {
                "name": device.name,
                "cores": device.cores,
                "memory_bytes": device.memory_bytes,
                "rate_mbit": device.rate_mbit,
            }
            for device in household.devices
        ]
        self._results.keep_household(name, devices)
        return Testbed(household)


def run(cells: Sequence[Cell], results: Results, wishes: Wishes) -> None:
    """Measure `cells`. KeyboardInterrupt leaves the file with what is done.

    Raises:
        ResultsError: the file has figures of other devices or cables.
        HouseholdError: no household, or the rate is none.
    """
    with tempfile.TemporaryDirectory(prefix="p2ptrain-bench-") as states:
        Bench(results, wishes, Path(states)).run(cells)


def _line(run: dict[str, Any]) -> str:
    if "error" in run:
        return f"failed: {run['error']}"
    reference, speed = run["aggregate"], run["samples_per_s"]
    predicted = run.get("predicted_samples_per_s")
    said = f", predicted {predicted / reference:.2f}" if predicted else ""
    return f"{speed:.1f} samples/s, {speed / reference:.2f} of aggregate{said}"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
