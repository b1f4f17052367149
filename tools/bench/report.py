"""From results to the numbers that are compared, and to one Markdown page of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tools.bench import alone
from tools.bench.cells import BATCH_SIZES, HOUSEHOLDS, MODELS, PLANNERS, SIZES, SYSTEMS, Cell, Place
from tools.bench.results import Results

COMPARED = "ddp"
"""What p2ptrain is held against."""
HEADLINE = "auto"
_COMPARED_STEP = 2
"""The round, from 0, whose loss every system has."""


@dataclass(frozen=True, slots=True)
class Row:
    """One household, model and size.

    Attributes:
        aggregate: samples/s of all devices alone, as last measured.
        measured: by system, the median fraction of aggregate.
        predicted: by planner, what `train` predicted of its plan, as a fraction.
        missing: by system, why there is no figure.
    """

    place: tuple[str, str, str]
    aggregate: float
    measured: dict[str, float]
    predicted: dict[str, float]
    missing: dict[str, str]

    @property
    def rival(self) -> float | None:
        """The rival's fraction."""
        return self.measured.get(COMPARED)

    @property
    def best_of_ours(self) -> tuple[str, float] | None:
        """`auto`'s fraction, or until that is measured the best planner's."""
        if HEADLINE in self.measured:
            return HEADLINE, self.measured[HEADLINE]
        ours = [(self.measured[name], name) for name in PLANNERS if name in self.measured]
        return (max(ours)[1], max(ours)[0]) if ours else None

    @property
    def over_rival(self) -> float | None:
        """How many times the rival's speed."""
        if self.best_of_ours is None or self.rival is None:
            return None
        return self.best_of_ours[1] / self.rival


def rows(results: Results) -> list[Row]:
    """Those of which anything is known, in the order of measuring."""
    every = (_row(results, place) for place in product(HOUSEHOLDS, MODELS, SIZES))
    return [row for row in every if row.measured or row.missing]


def _row(results: Results, place: tuple[str, str, str]) -> Row:
    household, model, size = place
    keys = {system: Cell(*place, system).key for system in SYSTEMS}
    kept = results.get("alone", Place(household, model).key)
    return Row(
        place,
        aggregate=alone.aggregate(kept, BATCH_SIZES[model][size]) if kept else float("nan"),
        measured={name: part for name, key in keys.items() if (part := results.fraction(key))},
        predicted={name: part for name, key in keys.items() if (part := _predicted(results, key))},
        missing={name: why for name, key in keys.items() if (why := results.why_not(key))},
    )


def _predicted(results: Results, key: str) -> float | None:
    """The last run's, as a fraction."""
    for run in reversed(results.runs(key)):
        if "predicted_samples_per_s" in run:
            return float(run["predicted_samples_per_s"] / run["aggregate"])
    return None


def same_training(results: Results, row: Row, step: int) -> dict[str, float]:
    """Each system's loss of round `step` (from 0) in its last run, to compare."""
    losses = {}
    for system in SYSTEMS:
        runs = results.runs(Cell(*row.place, system).key)
        known = [run["losses"] for run in runs if len(run.get("losses", ())) > step]
        if known:
            losses[system] = known[-1][step]
    return losses


def page(results: Results, known: Sequence[Row]) -> str:
    """The whole page."""
    parts = [
        "# Benchmark",
        _conditions(results),
        "## Fractions of aggregate",
        "Measured samples/s by the sum of what the devices reach alone; the median of the runs. "
        "`times rival`: `auto` (or the best planner measured) by ddp.",
        table(_fraction_rows(known)),
        "## Predicted",
        "Fractions again: what `train` said of its plan.",
        table(_prediction_rows(known)),
        "## What one round costs",
        "Over the rounds that count, the mean of a round, all devices together.",
        table(_spending_rows(results, known)),
        "## The same training",
        f"Loss of round {_COMPARED_STEP + 1}. Where a model has batch normalisation, statistics "
        "are a micro-batch's, and so is the loss in its last digits.",
        table(_loss_rows(results, known)),
        *_missing(known),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_report(results: Results, file: Path) -> None:
    """Write the page."""
    file.write_text(page(results, rows(results)), encoding="utf-8")


def table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is its head. Empty without a second one."""
    if len(lines) < 2:
        return ""
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])


def _conditions(results: Results) -> str:
    versions, machine = results.content["versions"], results.content["machine"]
    said = [f"{name} {value}" for name, value in {**versions, **machine}.items()]
    households = [
        f"- {name}: {_devices(described['devices'])}"
        for name, described in sorted(results.content["households"].items())
    ]
    return "\n".join([", ".join(said) + ".", "", *households])


def _devices(devices: Sequence[dict[str, Any]]) -> str:
    """Such as `5 x 0.3 core at 100 Mbit/s`."""
    kinds: dict[tuple[float, float | None], int] = {}
    for device in devices:
        kind = device["cores"], device["rate_mbit"]
        kinds[kind] = kinds.get(kind, 0) + 1
    return " + ".join(
        f"{count} x {cores:g} core at " + (f"{rate:g} Mbit/s" if rate else "full rate")
        for (cores, rate), count in kinds.items()
    )


def _fraction_rows(known: Sequence[Row]) -> list[Sequence[str]]:
    systems = [s for s in SYSTEMS if any(s in row.measured or s in row.missing for row in known)]
    head = ("household", "model", "size", "aggregate", *systems, "times rival")
    return [head, *(_fraction_row(row, systems) for row in known)]


def _fraction_row(row: Row, systems: Sequence[str]) -> Sequence[str]:
    return (
        *row.place,
        f"{row.aggregate:.4g}/s",
        *(_number(row.measured.get(s)) or ("no" if s in row.missing else "") for s in systems),
        _number(row.over_rival),
    )


def _prediction_rows(known: Sequence[Row]) -> list[Sequence[str]]:
    return [
        ("household", "model", "size", "planner", "measured", "predicted"),
        *(
            (*row.place, name, _number(row.measured.get(name)), _number(predicted))
            for row in known
            for name, predicted in row.predicted.items()
        ),
    ]


def _spending_rows(results: Results, known: Sequence[Row]) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [
        ("household", "model", "size", "system", "wall s", "processor s", "of their shares", "MB")
    ]
    for row in known:
        for system in SYSTEMS:
            cell = Cell(*row.place, system)
            runs = [run for run in results.runs(cell.key) if "spent" in run]
            if runs:
                lines.append((*row.place, system, *_spent(results, cell, runs[-1])))
    return lines


def _spent(results: Results, cell: Cell, run: dict[str, Any]) -> Sequence[str]:
    spent, count = run["spent"], len(run["round_seconds"])
    cpu, wall = sum(spent["cpu_seconds"].values()), spent["wall_seconds"]
    devices = results.get("households", cell.household)["devices"]
    shares = sum(d["cores"] for d in devices if d["name"] in spent["cpu_seconds"])
    sent = sum(spent["sent_bytes"].values()) / 1e6
    of_shares = f"{cpu / (wall * shares):.0%}"
    return f"{wall / count:.2f}", f"{cpu / count:.2f}", of_shares, f"{sent / count:.1f}"


def _loss_rows(results: Results, known: Sequence[Row]) -> list[Sequence[str]]:
    losses = [same_training(results, row, _COMPARED_STEP) for row in known]
    systems = [name for name in SYSTEMS if any(name in own for own in losses)]
    lines: list[Sequence[str]] = [("household", "model", "size", *systems)]
    for row, own in zip(known, losses, strict=True):
        if own:
            figures = (f"{own[name]:.6f}" if name in own else "" for name in systems)
            lines.append((*row.place, *figures))
    return lines


def _missing(known: Sequence[Row]) -> list[str]:
    reasons = [
        f"- {' '.join(row.place)} {system}: {reason}"
        for row in known
        for system, reason in row.missing.items()
    ]
    return ["## Not measured", "\n".join(reasons)] if reasons else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
