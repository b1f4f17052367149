"""What a figure was measured with, and when."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "numpy", "p2ptrain")


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
