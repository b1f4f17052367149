"""Real processes on this machine train together, and each command ends as it should."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path

import psutil
import pytest

from tests.system.household import EXPECT_SECONDS, Device, Household, losses_alone

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "small.py")
CODE = "48151623"
STEADY = ("--planner", "pp", "--no-replan")
"""One plan from start to end, unless a device comes or goes."""


async def _members(household: Household, *names: str) -> list[Device]:
    """Devices that have found each other."""
    devices = [await household.start(name, "join", "--code", CODE) for name in names]
    for device in devices:
        for name in names:
            if name != device.name:
                await device.expect("member", name=name, state="alive")
    return devices


def _losses(device: Device) -> list[float]:
    steps = device.events("step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    return [step["loss"] for step in steps]


async def _goes_on(holder: Device) -> None:
    """It trains as if nothing had been, until Ctrl-C."""
    (plan,) = holder.events("plan")
    assert plan["reason"] == "start"
    await holder.expect("step", step=holder.events("step")[-1]["step"] + 5)
    assert not holder.events("failure")
    holder.interrupt()
    assert await holder.exit_code() == 130
    assert all(math.isfinite(loss) for loss in _losses(holder))


@pytest.mark.parametrize("holder_first", [True, False])
async def test_training_gives_the_losses_of_one_device(
    household: Household, tmp_path: Path, holder_first: bool
) -> None:
    wanted = await losses_alone(household, SCRIPT)
    out = tmp_path / "weights.safetensors"
    train = ["train", SCRIPT, "--wait-for", "3", "--wait-timeout", "120", "--planner", "pp"]
    train += ["--code", CODE, "--out", str(out)]
    if holder_first:
        holder = await household.start("desk", *train)
        await holder.expect("ready")
    members = [await household.start(name, "join", "--code", CODE) for name in ("a", "b")]
    if not holder_first:
        for member in members:
            await member.expect("ready")
        holder = await household.start("desk", *train)
    await holder.succeed()
    assert _losses(holder) == wanted
    (plan,) = holder.events("plan")
    names = [device["name"] for stage in plan["stages"] for device in stage["devices"]]
    assert sorted(names) == ["a", "b", "desk"]
    assert plan["stages"][0]["units"][0] == 0
    assert holder.said[-1]["event"] == "done"
    assert out.stat().st_size > 0
    kinds = [event["event"] for event in holder.said]
    assert kinds.index("ready") < kinds.index("plan")


async def test_waiting_for_devices_that_do_not_come_ends(household: Household) -> None:
    arguments = ("--wait-for", "2", "--wait-timeout", "1", "--code", CODE)
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    assert await holder.exit_code() == 1
    assert holder.said[-1]["event"] == "error"


async def test_train_takes_the_place_of_a_running_join(household: Household) -> None:
    first, second = await _members(household, "desk", "b")
    ready = first.events("ready")[0]
    holder = await household.start("desk", "train", SCRIPT, "--wait-for", "2", call="desk")
    took = await holder.expect("ready")
    assert (took["name"], took["id"], took["port"]) == ("desk", ready["id"], ready["port"])
    await holder.succeed()
    back = await first.expect_that(
        lambda e: e["event"] == "ready" and e is not ready, "ready a second time"
    )
    assert (back["name"], back["id"], back["port"]) == ("desk", ready["id"], ready["port"])
    status = await household.ask("desk", "status")
    assert sorted(m["name"] for m in status.events[0]["members"]) == ["b", "desk"]
    second.terminate()
    await second.succeed()


async def test_a_member_that_trains_is_not_taken_away_by_a_train_of_its_own(
    household: Household,
) -> None:
    await _members(household, "a", "b")
    arguments = ("--wait-for", "3", "--code", CODE, "-o", "epochs=1000", *STEADY)
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step")
    second = await household.start("a", "train", SCRIPT)
    assert await second.exit_code() == 1
    assert "computing for desk's training" in second.said[-1]["message"]
    await _goes_on(holder)


async def test_a_killed_train_gives_its_place_back(household: Household) -> None:
    first, _ = await _members(household, "desk", "b")
    ready = first.events("ready")[0]
    arguments = ("--wait-for", "2", "-o", "epochs=1000")
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step")
    await holder.kill()
    await first.expect_that(lambda e: e["event"] == "ready" and e is not ready, "ready again")
    assert (await household.ask("desk", "status")).exit_code == 0


async def test_a_join_stopped_while_its_place_is_lent_leaves_it_to_train(
    household: Household,
) -> None:
    first, _ = await _members(household, "desk", "b")
    arguments = ("--wait-for", "2", "-o", "epochs=1000", *STEADY)
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step")
    first.terminate()
    await first.succeed()
    status = await household.ask("desk", "status")
    assert status.exit_code == 0
    assert sorted(m["name"] for m in status.events[0]["members"]) == ["b", "desk"]
    again = await household.start("desk", "join")
    assert await again.exit_code() == 1
    assert "p2ptrain train (process" in again.said[-1]["message"]
    await _goes_on(holder)


async def test_ctrl_c_in_train_is_130_and_members_stay(household: Household) -> None:
    member = await household.start("a", "join", "--code", CODE)
    arguments = ("--wait-for", "2", "--code", CODE, "-o", "epochs=1000", *STEADY)
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step")
    holder.interrupt()
    assert await holder.exit_code() == 130
    await member.expect("member", name="desk", state="left")
    status = await household.ask("a", "status")
    assert status.events[0]["job"] is None


async def test_training_goes_on_without_a_killed_device_to_the_same_bits(
    household: Household, tmp_path: Path
) -> None:
    steps = ("-o", "epochs=1000", "--steps", "40")
    kept, out = tmp_path / "alone.safetensors", tmp_path / "weights.safetensors"
    alone = ("train", SCRIPT, "--local", *steps, "--out", str(kept))
    reference = await household.start("alone", *alone)
    await reference.succeed()
    members = {n: await household.start(n, "join", "--code", CODE) for n in ("a", "b")}
    arguments = ("--wait-for", "3", "--code", CODE, *STEADY, *steps)
    holder = await household.start("desk", "train", SCRIPT, *arguments, "--out", str(out))
    await holder.expect("step", step=10)
    await members["b"].kill()
    await holder.expect("failure", name="b")
    recovered = await holder.expect("recovered")
    await holder.succeed()
    assert _losses(holder) == _losses(reference)
    assert out.read_bytes() == kept.read_bytes()
    _, second = holder.events("plan")
    assert (second["reason"], second["epoch"]) == ("failure", recovered["epoch"])
    used = {device["name"] for stage in second["stages"] for device in stage["devices"]}
    assert used == {"desk", "a"}


async def test_a_script_that_prints_does_not_disturb_the_events(
    household: Household, tmp_path: Path
) -> None:
    script = tmp_path / "loud.py"
    script.write_text(
        "import os, sys\n"
        "print('module')\n"
        f"sys.path.insert(0, {str(Path(SCRIPT).parent)!r})\n"
        "from small import job as quiet\n"
        "def job():\n"
        "    print('job')\n"
        "    os.write(1, b'from below\\n')\n"
        "    return quiet(epochs=1)\n"
    )
    device = await household.start("desk", "train", str(script), "--local")
    await device.succeed()  # every line of stdout was JSON
    assert "from below" in device.stderr


async def test_nobody_reads_the_output_any_more(tmp_path: Path) -> None:
    """`p2ptrain ... --json | head -1` ends, and says nothing on stderr."""
    command = f"p2ptrain train {SCRIPT} --local --json --state-dir {tmp_path} -o epochs=100000"
    shell = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m {command} | head -n 1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(EXPECT_SECONDS):
        out, err = await shell.communicate()
    assert json.loads(out)["event"]
    assert err == b""


def _second_member(device: Device) -> psutil.Process:
    """The process that it has started for another device of its machine."""
    processes = psutil.Process(device.pid).children()
    (found,) = [one for one in processes if any("device-2" in word for word in one.cmdline())]
    return found


async def test_one_command_is_several_members(household: Household) -> None:
    """They pair by themselves, train together, come back where they die, and end together."""
    first = await household.start("desk", "join", "--device", "cpu,cpu", "--code", CODE)
    await first.expect("member", name="desk-2", state="alive")
    holder = await household.start("desk", "train", SCRIPT, "--wait-for", "2", *STEADY)
    await holder.succeed()
    (plan,) = holder.events("plan")
    names = [device["name"] for stage in plan["stages"] for device in stage["devices"]]
    assert sorted(names) == ["desk", "desk-2"]
    child = _second_member(first)
    child.kill()
    seen = len(first.said)
    said = "the member on cpu has ended"
    await first.expect_that(lambda event: said in event.get("message", ""), said)
    await first.expect("ready", since=seen, name="desk-2")
    child = _second_member(first)
    first.terminate()
    assert await first.exit_code() == 0
    assert [event["event"] for event in first.said].count("stopped") == 1
    assert not child.is_running()
