"""Real processes on this machine: who finds whom, who trusts whom, and how each command ends."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.household import Device, Household

pytestmark = [pytest.mark.household, pytest.mark.timeout(150)]

SCRIPT = str(Path(__file__).parent / "jobs" / "small.py")
CODE = "48151623"
OTHER_CODE = "00000042"


@pytest.fixture
async def household(tmp_path: Path) -> AsyncIterator[Household]:
    async with Household(tmp_path) as household:
        yield household


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


async def test_join_says_ready_then_its_code_and_leaves_on_sigterm(household: Household) -> None:
    device = await household.start("laptop", "join")
    ready = await device.expect("ready", within_seconds=15)
    pairing = await device.expect("pairing")
    assert device.said.index(ready) < device.said.index(pairing)
    assert ready["name"] == "laptop"
    assert len(ready["id"]) == 64
    assert len(pairing["code"]) == 8
    device.terminate()
    assert (await device.succeed())[-1] == {"event": "stopped"}


async def test_a_code_pairs_devices_that_then_need_none(household: Household) -> None:
    first, second = await _members(household, "a", "b")
    second.terminate()
    await second.succeed()
    await first.expect("member", name="b", state="left")
    again = await household.start("b", "join")
    await again.expect("member", name="a", state="alive")
    assert again.events("pairing") == []


async def test_a_wrong_code_does_not_pair(household: Household) -> None:
    first = await household.start("a", "join", "--code", CODE)
    await first.expect("ready")
    stranger = await household.start("b", "join", "--code", OTHER_CODE)
    failed = await first.expect("pairing_failed")
    assert failed["attempts_left"] < 5
    await stranger.expect("pairing_failed")
    assert first.events("member") == [e for e in first.events("member") if e["name"] == "a"]


async def test_a_second_device_of_a_name_gets_a_number(household: Household) -> None:
    first = await household.start("one", "join", "--code", CODE, call="laptop")
    await first.expect("ready")
    second = await household.start("two", "join", "--code", CODE, call="laptop")
    await first.expect_that(
        lambda e: e["event"] == "member" and e["name"] == "laptop-2" and e["state"] == "alive",
        "laptop-2 is here",
    )
    status = await household.ask("two", "status")
    assert status.events[0]["name"] == "laptop-2"
    assert second.events("ready")


async def test_every_member_gives_the_same_status(household: Household) -> None:
    devices = await _members(household, "a", "b", "c")
    for device in devices:
        await device.expect("coordinator")
    answers = [await household.ask(name, "status") for name in ("a", "b", "c")]
    assert [answer.exit_code for answer in answers] == [0, 0, 0]
    seen = [
        (
            sorted((m["name"], m["id"], m["state"]) for m in answer.events[0]["members"]),
            answer.events[0]["coordinator"],
        )
        for answer in answers
    ]
    assert seen[0] == seen[1] == seen[2]
    assert [name for name, _, _ in seen[0][0]] == ["a", "b", "c"]


async def test_questions_need_a_running_member(household: Household) -> None:
    answer = await household.ask("nobody", "status")
    assert answer.exit_code == 1
    assert answer.events[0]["event"] == "error"
    assert "start `p2ptrain join`" in answer.stderr


async def test_a_removed_device_is_out_at_once(household: Household) -> None:
    first, _, third = await _members(household, "a", "b", "c")
    assert (await household.ask("a", "remove", "b")).exit_code == 0
    for device in (first, third):
        await device.expect_that(
            lambda e: e["event"] == "member" and e["name"] == "b" and e["state"] != "alive",
            "b is no member",
            within_seconds=5,
        )
    devices = await household.ask("c", "devices")
    assert "b" not in [device["name"] for device in devices.events[0]["devices"]]


async def test_removing_nobody_says_so(household: Household) -> None:
    device = await household.start("a", "join")
    await device.expect("ready")
    answer = await household.ask("a", "remove", "ghost")
    assert answer.exit_code == 1
    assert "ghost" in answer.stderr


async def test_an_invitation_lets_a_late_device_in(household: Household) -> None:
    first, _ = await _members(household, "a", "b")
    invited = await household.ask("a", "invite")
    assert invited.exit_code == 0
    code = invited.events[0]["code"]
    late = await household.start("c", "join", "--code", code)
    await late.expect("member", name="b", state="alive")
    await first.expect("member", name="c", state="alive")


@pytest.mark.parametrize("holder_first", [True, False])
async def test_training_gives_the_losses_of_one_device(
    household: Household, tmp_path: Path, holder_first: bool
) -> None:
    reference = await household.start("alone", "train", SCRIPT, "--local")
    await reference.succeed(90)
    out = tmp_path / "weights.safetensors"
    train = ["train", SCRIPT, "--wait-for", "3", "--wait-timeout", "60", "--planner", "pp"]
    train += ["--code", CODE, "--out", str(out)]
    if holder_first:
        holder = await household.start("desk", *train)
        await holder.expect("ready")
    members = [await household.start(name, "join", "--code", CODE) for name in ("a", "b")]
    if not holder_first:
        for member in members:
            await member.expect("ready")
        holder = await household.start("desk", *train)
    await holder.succeed(90)
    assert _losses(holder) == _losses(reference)
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
    await holder.succeed(90)
    back = await first.expect_that(
        lambda e: e["event"] == "ready" and e is not ready, "ready a second time"
    )
    assert (back["name"], back["id"], back["port"]) == ("desk", ready["id"], ready["port"])
    status = await household.ask("desk", "status")
    assert sorted(m["name"] for m in status.events[0]["members"]) == ["b", "desk"]
    second.terminate()
    await second.succeed()


async def test_a_killed_train_gives_its_place_back(household: Household) -> None:
    first, _ = await _members(household, "desk", "b")
    ready = first.events("ready")[0]
    arguments = ("--wait-for", "2", "-o", "epochs=1000")
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step", within_seconds=60)
    await holder.kill()
    await first.expect_that(lambda e: e["event"] == "ready" and e is not ready, "ready again")
    assert (await household.ask("desk", "status")).exit_code == 0


async def test_two_joins_on_one_folder_do_not_fight(household: Household) -> None:
    first = await household.start("a", "join")
    await first.expect("ready")
    second = await household.start("a", "join")
    assert await second.exit_code() == 1
    assert "p2ptrain join (process" in second.stderr


async def test_ctrl_c_in_train_is_130_and_members_stay(household: Household) -> None:
    member = await household.start("a", "join", "--code", CODE)
    arguments = ("--wait-for", "2", "--code", CODE, "-o", "epochs=1000", "--planner", "pp")
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step", within_seconds=60)
    holder.interrupt()
    assert await holder.exit_code() == 130
    await member.expect("member", name="desk", state="left")
    status = await household.ask("a", "status")
    assert status.events[0]["job"] is None


async def test_a_device_killed_during_training_is_named_within_5_s(household: Household) -> None:
    members = {n: await household.start(n, "join", "--code", CODE) for n in ("a", "b")}
    arguments = ("--wait-for", "3", "--code", CODE, "-o", "epochs=1000", "--planner", "pp")
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("step", within_seconds=60)
    await members["b"].kill()
    said = await holder.expect("error", within_seconds=5)
    assert "b" in said["message"].split()
    assert await holder.exit_code() == 1
    assert holder.said[-1] == said
    again = await household.start("desk", "train", SCRIPT, "--wait-for", "2", "--fresh")
    await again.succeed(90)
    assert math.isfinite(_losses(again)[-1])


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
    await device.succeed(60)  # every line of stdout was JSON
    assert "from below" in device.stderr


async def test_nobody_reads_the_output_any_more(tmp_path: Path) -> None:
    """`p2ptrain ... --json | head -1` ends, and says nothing on stderr."""
    command = f"p2ptrain train {SCRIPT} --local --json --state-dir {tmp_path} -o epochs=100000"
    shell = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m {command} | head -n 1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await shell.communicate()
    assert json.loads(out)["event"]
    assert err == b""
