"""The results' file: everything measured, kept after every figure, so that a run can be resumed.

{"format": "p2ptrain.bench/1",
 "machine": {...}, "versions": {...},
 "households": {"A": {"devices": [{"name", "cores", "memory_bytes", "rate_mbit"}]}},
 "alone": {"A/mobilenetv2": {"measured_at", "devices": {name: {...}}}},
 "cells": {"A/mobilenetv2/S/ddp": {"runs": [{"samples_per_s", "aggregate", ...} or {"error"}]}}}
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

FORMAT = "p2ptrain.bench/1"
PARTS = ("machine", "versions", "households", "alone", "cells")


_PACKAGES = ("torch", "transformers", "numpy", "p2ptrain")


class ResultsError(ValueError):
    """The file is none of ours."""


class Results:
    """The file's content, written whole after every change.

    Raises:
        ResultsError: the file that is there cannot be read as results, or none can be written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.content: dict[str, Any] = {"format": FORMAT, **{part: {} for part in PARTS}}
        if file is None:
            return
        if not file.parent.is_dir():
            raise ResultsError(f"there is no folder {file.parent} for {file.name}")
        if file.exists():
            self.content |= _read(file)

    def get(self, part: str, key: str) -> Any:
        """What is kept there, or None."""
        return self.content[part].get(key)

    def put(self, part: str, key: str, value: Any) -> None:
        """Keep a value, in the file too."""
        self.content[part][key] = value
        self._write()

    def keep_household(self, name: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Keep what a household is. Raises ResultsError: there are figures of another so called."""
        described = {"devices": [dict(device) for device in devices]}
        if self.get("households", name) not in (None, described):
            raise ResultsError(
                f"{self._file} has figures of household {name} with other devices or cables: "
                "give --out another file"
            )
        self.put("households", name, described)

    def add_run(self, cell: str, run: Mapping[str, Any]) -> None:
        """Keep one more run of a cell."""
        self.put("cells", cell, {"runs": [*self.runs(cell), dict(run)]})

    def runs(self, cell: str) -> list[dict[str, Any]]:
        """The runs of a cell so far, failed ones too."""
        kept: list[dict[str, Any]] = (self.get("cells", cell) or {}).get("runs", [])
        return kept

    def forget(self, cell: str) -> None:
        """Measure it again."""
        self.content["cells"].pop(cell, None)

    def runs_missing(self, cell: str, repeat: int) -> int:
        """How many runs a cell still lacks."""
        return max(0, repeat - sum("samples_per_s" in run for run in self.runs(cell)))

    def samples_per_s(self, cell: str) -> float | None:
        """The median of a cell's runs; None where there is none."""
        speeds = [run["samples_per_s"] for run in self.runs(cell) if "samples_per_s" in run]
        return median(speeds) if speeds else None

    def fraction(self, cell: str) -> float | None:
        """The median of its runs' fractions of what the devices reached alone at that time."""
        parts = [
            run["samples_per_s"] / run["aggregate"]
            for run in self.runs(cell)
            if "samples_per_s" in run
        ]
        return median(parts) if parts else None

    def chosen(self, cell: str) -> int | None:
        """Which of its settings a rival has found to be the best in an earlier run."""
        found = [run["setup"].get("chosen") for run in self.runs(cell) if "setup" in run]
        return found[-1] if found else None

    def why_not(self, cell: str) -> str | None:
        """The last error of a cell that has no figure."""
        errors = [run["error"] for run in self.runs(cell) if "error" in run]
        return errors[-1] if errors and self.samples_per_s(cell) is None else None

    def _write(self) -> None:
        if self._file is None:
            return
        new = self._file.with_name(f".{self._file.name}.new")
        try:
            new.write_text(json.dumps(self.content, indent=1, sort_keys=True), encoding="utf-8")
            os.replace(new, self._file)
        finally:
            with contextlib.suppress(FileNotFoundError):
                new.unlink()


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResultsError(f"{file} has not the format {FORMAT}")
    for part in PARTS:
        if not isinstance(content.get(part, {}), dict):
            raise ResultsError(f"{file}: {part} is no object")
    return content


def versions() -> dict[str, str]:
    """Of Python, the packages that matter and this repository."""
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "commit": _commit(),
    }


def machine() -> dict[str, str]:
    """Of what the household is emulated on."""
    return {
        "kernel": platform.release(),
        "processor": _processor(),
        "cpus": str(len(os.sched_getaffinity(0))),
    }


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def age_seconds(at: str) -> float:
    """Since a moment that `now` wrote down."""
    return (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()


def _commit() -> str:
    command = ("git", "rev-parse", "--short", "HEAD")
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
