"""Real processes miss each other in time, and take no freeze for a death: a sample.

tools/detection_times.py measures hundreds; the members here are its processes.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from tools.detection.member import Settings
from tools.detection.members import Members, Place
from tools.detection.trials import Failure, Found, measure, measure_freezes

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

LOOPBACK = [Place("127.0.0.1")]
BUSY_MACHINE_SECONDS = 2.0
"""On top of the bars that the tool holds the program to on a machine of its own."""
SILENCE_SECONDS = 2.0
"""Whoever is only silent is suspected for longer: what is missed sooner broke its links."""


def _later(seconds: float) -> float:
    return time.monotonic() + seconds


async def test_killed_and_frozen_processes_are_missed_by_all_and_replaced(tmp_path: Path) -> None:
    async with Members(tmp_path, 3, LOOPBACK, Settings()) as members:
        killed, frozen = Found(), Found()
        await measure(members, Failure.KILL, Random(1), 4, _later(120), killed)
        await measure(members, Failure.FREEZE, Random(2), 1, _later(120), frozen)
    assert killed.wrong == frozen.wrong == []
    assert max(killed.verdicts) < SILENCE_SECONDS <= min(frozen.verdicts)
    assert max(frozen.verdicts) <= 5.0 + BUSY_MACHINE_SECONDS
    elected = killed.elected + frozen.elected
    assert elected
    assert max(elected) <= 3.0 + BUSY_MACHINE_SECONDS


async def test_freezes_under_full_load_are_no_deaths(tmp_path: Path) -> None:
    async with Members(tmp_path, 4, LOOPBACK, Settings(load="hash")) as members:
        freezes, deaths = await measure_freezes(members, Random(3), 4, _later(120))
    assert freezes >= 4
    assert deaths == []
