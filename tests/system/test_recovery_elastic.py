"""Real processes come and leave while a job trains, and nothing in its losses shows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.household import Device, Household
from tools.testbed.network import private_network

pytestmark = [pytest.mark.household, pytest.mark.timeout(200)]

SCRIPT = str(Path(__file__).parent / "jobs" / "deep.py")
CODE = "48151623"


@pytest.fixture
async def household(tmp_path: Path) -> AsyncIterator[Household]:
    with private_network() as prefix:
        async with Household(tmp_path, prefix=prefix) as household:
            yield household


async def test_who_comes_later_is_taken_in_and_who_gets_sigterm_hands_its_work_over(
    household: Household,
) -> None:
    arguments = ("--wait-for", "2", "--code", CODE, "--planner", "pp")
    first = await household.start("a", "join", "--code", CODE)
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step", within_seconds=60)
    await household.start("b", "join", "--code", CODE)
    joined = await holder.expect("plan", within_seconds=60, reason="join")
    assert _used(joined) == {"desk", "a", "b"}
    await _goes_on(holder, joined)
    first.terminate()
    left = await holder.expect("plan", within_seconds=20, reason="leave")
    assert _used(left) == {"desk", "b"}
    await first.succeed(20)
    await _goes_on(holder, left)
    holder.interrupt()
    assert await holder.exit_code() == 130
    assert not holder.events("failure") + holder.events("recovered")
    losses = [step["loss"] for step in holder.events("step")]
    assert [step["step"] for step in holder.events("step")] == list(range(1, len(losses) + 1))
    steps = ("--steps", str(len(losses)))
    reference = await household.start("alone", "train", SCRIPT, "--local", *steps)
    await reference.succeed(100)
    assert [step["loss"] for step in reference.events("step")] == losses


async def _goes_on(holder: Device, plan: dict[str, object]) -> None:
    """Steps are made under the plan."""
    await holder.expect("step", since=holder.said.index(plan) + 5)


def _used(plan: dict[str, object]) -> set[str]:
    stages = plan["stages"]
    assert isinstance(stages, list)
    return {device["name"] for stage in stages for device in stage["devices"]}
