"""From results to the numbers that are compared: fractions of aggregate, ratios to rivals. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.bench import alone, targets
from tools.bench.cells import BATCH_SIZES, HOUSEHOLDS, MODELS, PLANNERS, SIZES, SYSTEMS, Cell, Place
from tools.bench.results import Results

COMPARED = ("ddp", "torch-pp")
"""The better of these is what p2ptrain is held against."""
HEADLINE = "auto"


@dataclass(frozen=True, slots=True)
class Row:
    """One household, model and size.

    Attributes:
        aggregate: samples/s of all devices alone, as last measured.
        measured: by system, the median fraction of aggregate.
        predicted: by planner, what `train` predicted of its plan, as a fraction.
        simulated: by planner, the simulator's fractions: plain, overlap.
        missing: by system, why there is no figure.
        target: the fraction to reach; None where nothing is asked.
    """

    household: str
    model: str
    size: str
    aggregate: float
    measured: dict[str, float]
    predicted: dict[str, float]
    simulated: dict[str, tuple[float | None, float | None]]
    missing: dict[str, str]
    target: float | None

    @property
    def rival(self) -> float | None:
        """The better rival's fraction."""
        return max((self.measured[s] for s in COMPARED if s in self.measured), default=None)

    @property
    def best_of_ours(self) -> tuple[str, float] | None:
        """`auto`'s fraction, or until that is measured the best planner's."""
        if HEADLINE in self.measured:
            return HEADLINE, self.measured[HEADLINE]
        ours = [(self.measured[name], name) for name in PLANNERS if name in self.measured]
        return (max(ours)[1], max(ours)[0]) if ours else None

    @property
    def over_rival(self) -> float | None:
        """How many times the better rival's speed."""
        if self.best_of_ours is None or self.rival is None:
            return None
        return self.best_of_ours[1] / self.rival


def rows(results: Results) -> list[Row]:
    """Those of which anything is known, in the order of measuring."""
    return [row for row in _every(results) if row.measured or row.simulated or row.missing]


def _every(results: Results) -> Iterator[Row]:
    for household in HOUSEHOLDS:
        for model in MODELS:
            for size in SIZES:
                yield _row(results, household, model, size)


def _row(results: Results, household: str, model: str, size: str) -> Row:
    cells = {system: Cell(household, model, size, system) for system in SYSTEMS}
    reference = _aggregate(results, household, model, size)
    fractions = {name: results.fraction(cell.key) for name, cell in cells.items()}
    predicted = {name: _predicted(results, cell) for name, cell in cells.items()}
    reasons = {name: results.why_not(cell.key) for name, cell in cells.items()}
    return Row(
        household=household,
        model=model,
        size=size,
        aggregate=reference,
        measured={name: part for name, part in fractions.items() if part},
        predicted={name: part for name, part in predicted.items() if part},
        simulated={
            name: _simulated(results, cell)
            for name, cell in cells.items()
            if results.get("simulated", cell.key)
        },
        missing={name: reason for name, reason in reasons.items() if reason},
        target=targets.fraction(household, model, size),
    )


def _aggregate(results: Results, household: str, model: str, size: str) -> float:
    kept = results.get("alone", Place(household, model).key)
    return alone.aggregate(kept, BATCH_SIZES[model][size]) if kept else float("nan")


def _predicted(results: Results, cell: Cell) -> float | None:
    """The last run's, as a fraction."""
    for run in reversed(results.runs(cell.key)):
        if "predicted_samples_per_s" in run:
            return float(run["predicted_samples_per_s"] / run["aggregate"])
    return None


def _simulated(results: Results, cell: Cell) -> tuple[float | None, float | None]:
    kept = results.get("simulated", cell.key)
    return kept["plain"].get("fraction"), kept["overlap"].get("fraction")


def same_training(results: Results, row: Row, step: int) -> dict[str, float]:
    """Each system's loss of round `step` (from 0) in its last run, to compare."""
    losses = {}
    for system in SYSTEMS:
        runs = results.runs(Cell(row.household, row.model, row.size, system).key)
        known = [run["losses"] for run in runs if len(run.get("losses", ())) > step]
        if known:
            losses[system] = known[-1][step]
    return losses
