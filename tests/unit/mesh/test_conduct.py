"""What is still an accident, what people hear, and who is cut off: a pure rule."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain import events
from p2ptrain.events import Event
from p2ptrain.mesh.conduct import (
    Allowance,
    Conduct,
    ConductAction,
    ConductConfig,
    Judgement,
    Offence,
)
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.notifications import WarnOnce

RENAMES = Offence.RENAMES
CONFIG = ConductConfig({RENAMES: Allowance(4, 0.5), Offence.STRANGERS: Allowance(4, 0.5)})


def steps(conduct: Conduct, moments: list[float], about: str = "") -> list[ConductAction | None]:
    said = [conduct.note("eve", RENAMES, moment, about) for moment in moments]
    return [None if judgement is None else judgement.step for judgement in said]


def test_what_happens_seldom_is_an_accident_for_ever() -> None:
    assert set(steps(Conduct(CONFIG), [2.0 * n for n in range(1000)])) == {None}


def test_too_much_at_once_is_said_once_and_three_times_as_much_ends_the_link() -> None:
    assert steps(Conduct(CONFIG), [0.0] * 20) == [
        *[None] * 4,
        ConductAction.WARN,
        *[None] * 7,
        ConductAction.CUT,
        *[None] * 7,
    ]


def test_the_user_is_warned_again_after_a_while() -> None:
    conduct = Conduct(CONFIG)
    steps(conduct, [0.0] * 6)
    assert steps(conduct, [100.0] * 5)[-1] is ConductAction.WARN


def test_victims_are_counted_one_by_one() -> None:
    conduct = Conduct(CONFIG)
    for victim in "abcdefgh":
        assert set(steps(conduct, [0.0] * 4, victim)) == {None}


def test_what_is_remembered_is_bounded() -> None:
    conduct = Conduct(ConductConfig(CONFIG.allowances, buckets_limit=8))
    for number in range(1000):
        assert conduct.note("eve", RENAMES, 0.0, str(number)) is None
    assert conduct.note("eve", RENAMES, 0.0, why="so") is None


def test_who_pairs_again_begins_as_all_do() -> None:
    conduct = Conduct(CONFIG)
    assert steps(conduct, [0.0] * 13)[-1] is ConductAction.CUT
    conduct.forgive("eve")
    assert steps(conduct, [0.0] * 13)[-1] is ConductAction.CUT


@pytest.mark.parametrize("offence", Offence)
def test_every_offence_has_its_allowance_and_its_words(offence: Offence) -> None:
    conduct = Conduct()
    judgements = [conduct.note("eve", offence, 0.0, why="so") for _ in range(4000)]
    said = [judgement for judgement in judgements if judgement is not None]
    assert said == [
        Judgement(step, f"{offence.value} (so)") for step in (ConductAction.WARN, ConductAction.CUT)
    ]


async def test_the_guard_names_the_device_and_counts_nothing_of_those_that_are_cut_off() -> None:
    seen: list[Event] = []
    ended: list[str] = []
    trust: Any = SimpleNamespace(
        name=lambda _id: "eve", book={"cut off here": None}, is_trusted=lambda _id: True
    )
    notices = WarnOnce(seen.append, trust.name)
    guard = Guard(trust, notices, ended.append, CONFIG, now=lambda: 0.0)
    assert guard.is_listened_to("id of eve")
    for _ in range(50):
        guard.note("id of eve", Offence.STRANGERS, "cut off here")
    assert seen == []
    for number in range(50):
        guard.note("id of eve", Offence.STRANGERS, f"ghost {number}", "\x1b[2J")
    warned, cut = [event for event in seen if isinstance(event, events.Warning)]
    assert warned.name == cut.name == "eve"
    assert "\x1b" not in warned.message + cut.message
    assert "p2ptrain remove eve" in cut.message
    assert not guard.is_listened_to("id of eve")
    assert ended == []
    await asyncio.sleep(0)  # not in the middle of a message
    assert ended == ["id of eve"]
    assert guard.cut_off.keys() == {"id of eve"}
