"""Devices that stand still for a while, as closed laptops do, and what their job makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.household import Device, Household, losses_alone

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

JOB = (str(Path(__file__).parent / "jobs" / "small.py"), "-o", "epochs=1000", "--steps", "40")
CODE = "48151623"


async def _train(household: Household) -> Device:
    arguments = ("--wait-for", "3", "--planner", "pp", "--code", CODE)
    return await household.start("desk", "train", *JOB, *arguments)


def _losses(holder: Device) -> list[float]:
    steps = holder.events("step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    return [step["loss"] for step in steps]


async def test_a_holder_that_was_asleep_goes_on_where_it_was(household: Household) -> None:
    wanted = await losses_alone(household, *JOB)
    members = [await household.start(name, "join", "--code", CODE) for name in ("a", "b")]
    holder = await _train(household)
    await holder.expect("step", step=10)
    holder.freeze()
    for member in members:
        await member.expect("waiting", **{"for": "desk"})
    holder.thaw()
    await holder.succeed()
    assert _losses(holder) == wanted


async def test_who_wakes_up_when_the_job_has_ended_is_free_for_the_next(
    household: Household,
) -> None:
    """A `join` has had the holder's place since, and the device never left."""
    wanted = await losses_alone(household, *JOB)
    first, second = [await household.start(name, "join", "--code", CODE) for name in ("a", "b")]
    desk = await household.start("desk", "join", "--code", CODE)
    await desk.expect("ready")
    holder = await _train(household)
    await holder.expect("step", step=10)
    first.freeze()
    await holder.expect("failure", name="a")
    await holder.succeed()
    assert _losses(holder) == wanted
    left = await second.expect("member", name="desk", state="left")
    since = second.said.index(left)
    await second.expect("member", since=since, name="desk", state="alive")
    first.thaw()
    since = len(second.said)
    await second.expect("member", since=since, name="a", state="alive")
    again = await _train(household)  # it looks just like the one before
    await again.succeed()
    assert _losses(again) == wanted
