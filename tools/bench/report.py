"""The results as one Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import targets
from tools.bench.cells import PLANNERS, SYSTEMS, Cell
from tools.bench.fractions import Row, rows, same_training
from tools.bench.results import Results

_COMPARED_STEP = 2
"""The round, from 0, whose loss every system has."""


def write_report(results: Results, file: Path) -> None:
    """Write the page."""
    file.write_text(page(results, rows(results)), encoding="utf-8")


def page(results: Results, known: Sequence[Row]) -> str:
    """The whole page."""
    parts = [
        "# Benchmark",
        _conditions(results),
        "## Fractions of aggregate",
        "Measured samples/s by the sum of what the devices reach alone; the median of the runs. "
        "`target`: what the best 1F1B plans known reach in simulation, less 5%. `times rival`: "
        "`auto` (or the best planner measured) by the better of ddp and torch-pp.",
        table(_fraction_rows(known)),
        "## Predicted and simulated",
        "Fractions again. `predicted`: what `train` said of its plan; `plain` and `overlap`: the "
        "simulator's plan by either cost model, from profiles measured on the same devices.",
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
    systems = [name for name in SYSTEMS if any(_has(row, name) for row in known)]
    head = ("household", "model", "size", "aggregate", *systems, "target", "times rival", "asked")
    return [head, *(_fraction_row(row, systems) for row in known if row.measured or row.missing)]


def _has(row: Row, system: str) -> bool:
    return system in row.measured or system in row.missing


def _fraction_row(row: Row, systems: Sequence[str]) -> Sequence[str]:
    return (
        *_place(row),
        f"{row.aggregate:.4g}/s",
        *(_measured(row, system) for system in systems),
        _number(row.target),
        _number(row.over_rival),
        f"{targets.OVER_RIVALS[row.size]:g}",
    )


def _measured(row: Row, system: str) -> str:
    if system in row.measured:
        return f"{row.measured[system]:.2f}"
    return "no" if system in row.missing else ""


def _prediction_rows(known: Sequence[Row]) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [
        ("household", "model", "size", "planner", "measured", "predicted", "plain", "overlap")
    ]
    for row in known:
        for name in PLANNERS:
            if name in row.predicted or name in row.simulated:
                plain, overlap = row.simulated.get(name, (None, None))
                figures = (row.measured.get(name), row.predicted.get(name), plain, overlap)
                lines.append((*_place(row), name, *map(_number, figures)))
    return lines


def _spending_rows(results: Results, known: Sequence[Row]) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [
        ("household", "model", "size", "system", "wall s", "processor s", "of their shares", "MB")
    ]
    for row in known:
        for system in SYSTEMS:
            cell = Cell(row.household, row.model, row.size, system)
            runs = [run for run in results.runs(cell.key) if "spent" in run]
            if runs:
                lines.append((*_place(row), system, *_spent(results, cell, runs[-1])))
    return lines


def _spent(results: Results, cell: Cell, run: dict[str, Any]) -> Sequence[str]:
    spent, count = run["spent"], len(run["round_seconds"])
    cpu, wall = sum(spent["cpu_seconds"].values()), spent["wall_seconds"]
    devices = results.get("households", cell.household)["devices"]
    shares = sum(d["cores"] for d in devices if d["name"] in spent["cpu_seconds"])
    sent = sum(spent["sent_bytes"].values()) / 1e6
    return (
        f"{wall / count:.2f}",
        f"{cpu / count:.2f}",
        f"{cpu / (wall * shares):.0%}",
        f"{sent / count:.1f}",
    )


def _loss_rows(results: Results, known: Sequence[Row]) -> list[Sequence[str]]:
    losses = [same_training(results, row, _COMPARED_STEP) for row in known]
    systems = [name for name in SYSTEMS if any(name in own for own in losses)]
    lines: list[Sequence[str]] = [("household", "model", "size", *systems)]
    for row, own in zip(known, losses, strict=True):
        if own:
            figures = (f"{own[name]:.6f}" if name in own else "" for name in systems)
            lines.append((*_place(row), *figures))
    return lines


def _missing(known: Sequence[Row]) -> list[str]:
    reasons = [
        f"- {row.household} {row.model} {row.size} {system}: {reason}"
        for row in known
        for system, reason in row.missing.items()
    ]
    return ["## Not measured", "\n".join(reasons)] if reasons else []


def _place(row: Row) -> tuple[str, str, str]:
    return row.household, row.model, row.size


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
