"""What every test gets: one compute thread, and loud words where something could not be tested."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: several devices share the cores
os.environ["MKL_NUM_THREADS"] = "1"

import asyncio
import functools
import gc
import io
import logging
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.thorough import examples_of

gc.disable()  # what is loaded and collected stays: half of that time is looking through it in vain

IN_CI = os.environ.get("CI") == "true"

# a busy machine is no failure; in CI a failure must come again in the next run
settings.register_profile("here", deadline=None, max_examples=examples_of(20))
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=examples_of(20))
settings.load_profile("ci" if IN_CI else "here")

_NEEDED_TOOLS = ("ip", "tc", "nsenter", "unshare")
_TESTS = Path(__file__).parent
_ROOMS = ("system", "integration/model", "unit/model", "simulation", "integration", "gpu", "unit")
"""In the order in which they begin, what takes longest first (`pytest -n 3`)."""
_TOGETHER = ("integration/model", "unit/model", "system")
"""Their tests share models that are captured once, or must not run side by side; others go by file.
One process has the real devices, which mostly wait; the others compute beside them."""
_NICENESS = 5
"""Of the processes that compute: real devices have the cores when they want them."""


@functools.cache
def _namespaces_missing() -> str | None:
    """Why network namespaces cannot be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _NEEDED_TOOLS if shutil.which(tool) is None]
    if missing:
        return f"missing: {', '.join(missing)} (iproute2, util-linux)"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"root may not make them here: {made.stderr.strip()}" if made.returncode else None


def pytest_configure(config: pytest.Config) -> None:
    """All but the first process let it go before them: the first begins with the real devices."""
    worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
    if worker != "gw0" and hasattr(os, "nice"):
        os.nice(_NICENESS)


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, among what the tests make."""
    gc.freeze()
    gc.enable()
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # pytest attaches itself, six times a test, to all that do not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the rooms, and skip tests that need namespaces where there are none."""
    items.sort(key=lambda item: _ROOMS.index(_room(item.nodeid)))
    for item in items:
        if item.get_closest_marker("namespaces") and not _must_run() and _namespaces_missing():
            item.add_marker(pytest.mark.skip(reason=str(_namespaces_missing())))


def _room(nodeid: str) -> str:
    folder = Path(nodeid.partition("::")[0]).parent.as_posix().removeprefix(f"{_TESTS.name}/")
    return next((room for room in _ROOMS if f"{folder}/".startswith(f"{room}/")), "system")


def _group(nodeid: str) -> str:
    """Of tests that one process runs."""
    room = _room(nodeid)
    return room if room in _TOGETHER else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal the groups out in order. xdist's own groups are ignored by pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    class Groups(LoadScopeScheduling):
        @property
        def nodes(self) -> list[WorkerController]:
            """The first process gets the first group."""
            return sorted(super().nodes, key=lambda node: str(node.gateway.id))

        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

        def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
            """One that has collected other tests than those before it gets none."""
            super().add_node_collection(node, collection)
            if node not in self.registered_collections:
                node.shutdown()

        def remove_node(self, node: WorkerController) -> str | None:
            """The test that ended its process has failed: it does not run again."""
            left = self.assigned_work[node].values()
            crashed = next((test for unit in left for test, done in unit.items() if not done), None)
            for unit in left:
                if crashed in unit:
                    unit[crashed] = True
            super().remove_node(node)
            return crashed

        def _reschedule(self, node: WorkerController) -> None:
            """A process runs its last test once it has another, or knows that none comes."""
            if node not in self.registered_collections:
                return  # it takes the place of one that has ended, and collects
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Groups(config, log)


def _must_run() -> bool:
    return IN_CI and sys.platform.startswith("linux")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """In CI on Linux a test that cannot run has failed."""
    if item.get_closest_marker("namespaces") and _must_run() and _namespaces_missing():
        pytest.fail(f"CI=true, but {_namespaces_missing()}", pytrace=False)


def pytest_runtest_teardown() -> None:
    """What computes as a card does flushes numbers near zero, in the thread that calls it: here."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[object],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of a hang the stack shows the event loop alone: say what its tasks wait for."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        waiting = io.StringIO()
        for task in gc.get_objects():  # the loop is no thread's current one any more
            if isinstance(task, asyncio.Task) and not task.done():
                task.print_stack(file=waiting)
        report.sections.append(("asyncio tasks", waiting.getvalue()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in a line of its own what was not tested."""
    every = terminalreporter.stats.get("skipped", [])
    reports = [report for report in every if isinstance(report, pytest.TestReport)]
    skipped = sum("namespaces" in report.keywords for report in reports)
    if skipped:
        terminalreporter.write_line(
            f"NOT TESTED: {skipped} tests on separate networks ({_namespaces_missing()})",
            red=True,
            bold=True,
        )
    skipped = [report for report in reports if "gpu" in report.keywords]
    if skipped:
        terminalreporter.write_line(
            f"NOT TESTED: {len(skipped)} tests on an accelerator", red=True, bold=True
        )
