"""What every test gets: one compute thread, and loud words where something could not be tested."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: several devices share the cores
os.environ["MKL_NUM_THREADS"] = "1"

import shutil
import sys

import pytest

_NEEDED_TOOLS = ("ip", "tc", "nsenter")
_skipped: list[str] = []


def _namespaces_missing() -> str | None:
    """Why network namespaces cannot be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _NEEDED_TOOLS if shutil.which(tool) is None]
    return f"missing: {', '.join(missing)} (iproute2, util-linux)" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need namespaces where there are none; never in CI as root."""
    reason = _namespaces_missing()
    must_run = os.environ.get("CI") == "true" and hasattr(os, "geteuid") and os.geteuid() == 0
    if reason is None or must_run:
        return
    for item in items:
        if item.get_closest_marker("namespaces"):
            item.add_marker(pytest.mark.skip(reason=reason))
            _skipped.append(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in a line of its own what was not tested."""
    if _skipped:
        terminalreporter.write_line(
            f"NOT TESTED: {len(_skipped)} tests on separate networks ({_namespaces_missing()})",
            red=True,
            bold=True,
        )
