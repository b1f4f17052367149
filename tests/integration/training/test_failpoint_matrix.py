"""A seeded sample of `tools/failpoint_matrix.py`, the same every day of a run of tests."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.support.fault_checks import problems
from tests.support.fault_list import every_fault, random_fault
from tests.support.faults import GROUP, PIPELINE, Fault, Outcome, outcome_of, undisturbed

SAMPLE = 4
RANDOM_KILLS = 1


def _sample() -> list[Fault]:
    """Some of each plan; others every time that the list of all grows."""
    chance = random.Random(5)
    faults = [fault for fault in every_fault() if not fault.may_miss]
    in_group = [fault for fault in faults if fault.stages is GROUP]
    alone = [fault for fault in faults if fault.stages is PIPELINE]
    return [*chance.sample(alone, SAMPLE), chance.choice(in_group)]


@cache
def _known() -> dict[tuple[int, str, bool], Outcome]:
    """The undisturbed runs, by plan."""
    return {}


async def _wanted(fault: Fault) -> Outcome:
    known = _known()
    plan = (id(fault.stages), fault.places, fault.clips)
    if plan not in known:
        known[plan] = await undisturbed(fault)
    return known[plan]


@pytest.mark.parametrize(
    "fault", [*_sample(), *(random_fault(seed) for seed in range(RANDOM_KILLS))], ids=str
)
async def test_whichever_device_dies_wherever_nothing_shows_it(fault: Fault) -> None:
    wanted = await _wanted(fault)
    assert problems(await outcome_of(fault), wanted, fault) == []


async def test_what_must_not_show_would_be_seen() -> None:
    """The checks are not blind: a run with another step, sample or weight is found out."""
    fault = Fault("")
    wanted = await _wanted(fault)
    other = await undisturbed(fault)
    assert problems(other, wanted, fault) == []
    other.asked[-1][20], other.asked[-1][21] = other.asked[-1][21], other.asked[-1][20]
    assert problems(other, wanted, fault) == ["samples out of order in plan 1"]
    other.weights["encode.bias"][0] += 1e-7
    assert "other bits in encode.bias" in problems(other, wanted, fault)
    other.events.append(other.events[-2])
    assert len(problems(other, wanted, fault)) >= 2
