"""Real processes find, trust and lose one another: each test a story, as starting takes seconds."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from p2ptrain._version import PROTOCOL_VERSION
from tests.system.household import Device, Household

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

CODE = "48151623"
WRONG_CODE = "00000042"


async def _all_alive(*devices: Device) -> None:
    for device in devices:
        for other in devices:
            if other is not device:
                await device.expect("member", name=other.name, state="alive")


async def _members(household: Household, name: str) -> dict[str, str]:
    """name -> state, as the device `name` says."""
    answer = await household.ask(name, "status")
    assert answer.exit_code == 0, answer.stderr
    return {member["name"]: member["state"] for member in answer.events[0]["members"]}


async def test_from_the_first_code_to_the_same_answer_everywhere(household: Household) -> None:
    first = await household.start("a", "join")
    ready = await first.expect("ready")
    pairing = await first.expect("pairing")
    assert first.said.index(ready) < first.said.index(pairing)
    assert (ready["name"], len(ready["id"])) == ("a", 64)
    code = pairing["code"]
    second, namesake = await asyncio.gather(
        household.start("b", "join", "--code", f"{code[:4]}-{code[4:]}"),
        household.start("c", "join", "--code", code, call="a"),
    )
    busy = await household.start("a", "join")  # a second command on a folder that is in use
    await first.expect("member", name="b", state="alive")
    await first.expect("member", name="a-2", state="alive")
    await namesake.expect("renamed", name="a-2")
    await second.expect("member", name="a-2", state="alive")
    assert await busy.exit_code() == 1
    assert "p2ptrain join (process" in busy.stderr
    answers = await asyncio.gather(*(household.ask(name, "status") for name in "abc"))
    told = [
        (
            sorted((m["name"], m["id"], m["state"]) for m in answer.events[0]["members"]),
            answer.events[0]["coordinator"],
        )
        for answer in answers
    ]
    assert told[0] == told[1] == told[2]
    assert [name for name, _, _ in told[0][0]] == ["a", "a-2", "b"]
    for path in household.state_dir("a").rglob("*"):
        private = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == private, path
    devices = await household.ask("b", "devices")
    assert {device["name"] for device in devices.events[0]["devices"]} == {"a", "a-2"}
    first.terminate()
    namesake.interrupt()
    for device in (first, namesake):
        assert (await device.succeed())[-1] == {"event": "stopped"}
        assert device.stderr == ""
    await second.expect("member", name="a", state="left")
    await second.expect("member", name="a-2", state="left")
    again = await household.start("c", "join", call="a")
    assert (await again.expect("ready"))["name"] == "a-2"
    await again.expect("member", name="b", state="alive")
    assert again.events("pairing") == []


async def test_a_removed_device_is_out_until_it_is_invited(household: Household) -> None:
    devices = [await household.start(name, "join", "--code", CODE) for name in "abc"]
    first, second, third = devices
    await _all_alive(*devices)
    unknown = await household.ask("a", "remove", "ghost")
    assert unknown.exit_code == 1
    assert "ghost" in unknown.stderr
    assert (await household.ask("a", "remove", "c")).exit_code == 0
    for device in (first, second):
        await device.expect("member", name="c", state="dead")
    told = (await third.expect("warning"))["message"]  # by whichever cut it off first
    assert any(f"{name} does not accept this device" in told for name in "ab"), told
    listed = await household.ask("b", "devices")
    assert [device["name"] for device in listed.events[0]["devices"]] == ["a"]
    await third.expect_that(  # it still knows the code, and tries it
        lambda e: e["event"] == "warning" and "does not accept a code" in e["message"],
        "it is refused",
    )
    assert await _members(household, "b") == {"a": "alive", "b": "alive"}
    invited = await household.ask("b", "invite")
    code = invited.events[0]["code"]
    assert code != CODE
    third.interrupt()
    await third.succeed()
    seen = len(first.said)
    back = await household.start("c", "join", "--code", code)
    await back.expect("member", name="a", state="alive")
    await first.expect("member", since=seen, name="c", state="alive")


async def test_strangers_learn_why_they_are_refused(household: Household, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text(
        "import p2ptrain._version as version\nversion.PROTOCOL_VERSION += 1\n"
    )
    path = {"PYTHONPATH": f"{newer}:{Path(__file__).parents[2]}"}
    first = await household.start("a", "join", "--code", CODE)
    wrong = await household.start("b", "join", "--code", WRONG_CODE)
    other = await household.start("c", "join", "--code", CODE, environment=path)
    for device in (first, wrong):
        assert (await device.expect("pairing_failed"))["attempts_left"] < 5
    words = f" {PROTOCOL_VERSION} ", f" {PROTOCOL_VERSION + 1} "
    for device in (first, other):
        await device.expect_that(
            lambda e: e["event"] == "warning" and all(w in e["message"] for w in words),
            "both versions",
        )
    assert await _members(household, "a") == {"a": "alive"}
    for name in "ab":
        listed = await household.ask(name, "devices")
        assert listed.events[0]["devices"] == []


async def test_wrong_words_and_missing_members_are_said(household: Household) -> None:
    for command in ("status", "devices", "invite"):
        answer = await household.ask("nobody", command)
        assert answer.exit_code == 1
        assert answer.events[0]["event"] == "error"
        assert "Start it: p2ptrain join" in answer.stderr
    for words in (["--bogus"], ["--code", "123"], ["--peer", "a:b:c"], ["--name", "a/b"]):
        answer = await household.ask("nobody", "join", *words)
        assert answer.exit_code == 2, words


async def test_doctor_looks_at_versions_interfaces_and_multicast(household: Household) -> None:
    answer = await household.ask("a", "doctor")
    assert answer.exit_code == 0
    subjects = [check["subject"] for check in answer.events]
    for subject in ("p2ptrain", "python", "torch", "zeroconf", "clock", "memory"):
        assert subject in subjects
    assert any(subject.startswith("interface") for subject in subjects)
    assert any(subject.startswith("multicast on") for subject in subjects)
    assert "firewall" in subjects
    links = answer.events[-1]
    assert (links["subject"], links["verdict"]) == ("links", "ok")
    assert "Start it: p2ptrain join" in links["found"]


async def test_doctor_measures_the_links_of_the_member_that_runs_here(
    household: Household,
) -> None:
    first = await household.start("a", "join", "--code", CODE)
    second = await household.start("b", "join", "--code", CODE)
    await _all_alive(first, second)
    answer = await household.ask("a", "doctor")
    link = answer.events[-1]
    assert (link["subject"], link["verdict"]) == ("link to b", "ok"), link
    assert "Mbit/s" in link["found"]
