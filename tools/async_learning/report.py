"""The curves as a table and a picture: mean over seeds, against epochs and against seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.async_learning import chart
from tools.async_learning.curves import Course
from tools.async_learning.seconds import timed
from tools.async_learning.settings import SETTINGS, Setting

TARGETS = (0.9, 0.95, 0.97)
"""Accuracies whose epochs are held against one device's."""
TARGET = 0.95
"""Of them the one that the table shows."""


@dataclass(frozen=True)
class Row:
    """A setting's curves.

    Attributes:
        seeds: of which there is one.
        loss: mean of each epoch, over its mini-batches and the seeds.
        accuracy: after each epoch, mean over seeds.
        last: accuracy after the last epoch, by seed.
        epoch_seconds: simulated.
        reached: of each of TARGETS, mean over seeds of the epochs until then, between two in
            proportion; None where a seed never gets there.
        proved: whether the real runtime gave the same losses and weights, to the bit; None where
            that was not tried.
    """

    setting: Setting
    seeds: Sequence[int]
    loss: Sequence[float]
    accuracy: Sequence[float]
    last: Sequence[float]
    epoch_seconds: float
    reached: Mapping[float, float | None]
    proved: bool | None

    def more_updates(self, one: Row) -> float | None:
        """How many times as many updates as `one` it needs: geometric mean over TARGETS."""
        own, others = list(self.reached.values()), list(one.reached.values())
        if None in own or None in others:
            return None
        ratios = [mine / its for mine, its in zip(own, others, strict=True) if mine and its]
        return statistics.geometric_mean(ratios)


def rows(curves: Mapping[str, Mapping[str, Any]], course: Course) -> list[Row]:
    """Of all settings that have curves."""
    found = []
    for setting in SETTINGS:
        seeds = sorted(
            int(key.split("/")[1]) for key in curves if key.split("/")[0] == setting.name
        )
        if not seeds:
            continue
        own = [curves[f"{setting.name}/{seed}"] for seed in seeds]
        found.append(
            Row(
                setting=setting,
                seeds=seeds,
                loss=_mean([by_epoch(curve["losses"], course.updates) for curve in own]),
                accuracy=_mean([curve["accuracy"] for curve in own]),
                last=[curve["accuracy"][-1] for curve in own],
                epoch_seconds=timed(setting, course.updates).epoch_seconds,
                reached={target: reached(target, own) for target in TARGETS},
                proved=proved(setting, seeds, curves),
            )
        )
    return found


def reached(target: float, own: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean over curves of the epochs until `target`; None = one never gets there."""
    found = [epochs_until(target, curve["accuracy"]) for curve in own]
    known = [epochs for epochs in found if epochs is not None]
    return statistics.mean(known) if len(known) == len(found) else None


def proved(
    setting: Setting, seeds: Sequence[int], curves: Mapping[str, Mapping[str, Any]]
) -> bool | None:
    """See `Row`."""
    same = [
        all(curves[f"runtime/{key}"][part] == curves[key][part] for part in ("losses", "weights"))
        for key in (f"{setting.name}/{seed}" for seed in seeds)
        if f"runtime/{key}" in curves
    ]
    return all(same) if same else None


def by_epoch(losses: Sequence[float], updates: int) -> list[float]:
    """The mean of each epoch's losses."""
    return [
        statistics.mean(losses[first : first + updates]) for first in range(0, len(losses), updates)
    ]


def epochs_until(target: float, accuracy: Sequence[float]) -> float | None:
    """After how many epochs a curve that begins at 0 comes to `target`; None = never."""
    before = 0.0
    for epochs, now in enumerate(accuracy):
        if now >= target:
            return epochs + (target - before) / (now - before)
        before = now
    return None


def table(found: Sequence[Row]) -> str:
    """Markdown."""
    one = found[0]
    lines = [
        "| setting | accuracy at the end: mean (each seed) | against one device | "
        f"epochs to {TARGET:.0%} | times as many updates | s an epoch | s to {TARGET:.0%} | "
        "runtime = formula |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        each = ", ".join(f"{last:.3f}" for last in row.last)
        points = 100 * (statistics.mean(row.last) - statistics.mean(one.last))
        epochs, more = row.reached[TARGET], row.more_updates(one)
        seconds = "never" if epochs is None else f"{epochs * row.epoch_seconds:.0f}"
        same = {True: "yes", False: "NO", None: ""}[row.proved]
        lines.append(
            f"| `{row.setting.command}` | {statistics.mean(row.last):.3f} ({each}) | "
            f"{points:+.1f} points | {_or_never(epochs)} | {_or_never(more)} | "
            f"{row.epoch_seconds:.1f} | {seconds} | {same} |"
        )
    return "\n".join(lines)


def write(stem: Path, curves: Mapping[str, Mapping[str, Any]], course: Course) -> None:
    """`STEM.md` and `STEM.svg`."""
    found = rows(curves, course)
    stem.with_suffix(".md").write_text(table(found) + "\n", encoding="utf-8")
    lines = [
        chart.Line(row.setting.name, row.epoch_seconds, row.loss, row.accuracy) for row in found
    ]
    stem.with_suffix(".svg").write_text(chart.draw(lines), encoding="utf-8")


def _or_never(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def _mean(columns: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(column) for column in zip(*columns, strict=True)]
