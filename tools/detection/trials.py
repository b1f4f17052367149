"""One failure after the other, and how long the others took to say so."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TypeAlias

from tools.detection.members import Members

HORIZON_SECONDS = 15.0

Cable: TypeAlias = Callable[[str, bool], None]
"""(name, plugged): pulls a member's cable, or plugs it in."""


class Failure(StrEnum):
    """How a device fails."""

    KILL = "kill"
    FREEZE = "freeze"
    CABLE = "cable"


@dataclass(slots=True)
class Found:
    """Seconds, one entry a trial.

    Attributes:
        first, last: from the failure to the first, and to the last survivor's verdict.
        verdicts: of every survivor.
        elected: from the first verdict until all survivors follow a new coordinator, where the
            failed one was it.
        wrong: who else was declared dead.
    """

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    verdicts: list[float] = field(default_factory=list)
    elected: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def quantile(values: list[float], share: float) -> float:
    """The least of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


async def measure(
    members: Members,
    failure: Failure,
    rng: Random,
    trials: int,
    deadline: float,
    found: Found,
    cable: Cable | None = None,
) -> None:
    """Fail one member after another, each back before the next, into `found`.

    Every second one is the coordinator. Ends early at `deadline`, of the monotonic clock.
    """
    for trial in range(trials):
        await asyncio.sleep(rng.uniform(0.3, 1.0))  # anywhere in the members' timers
        if time.monotonic() > deadline:
            return
        leader = members[members.names[0]].coordinator[0]
        victim = rng.choice(members.names) if trial % 2 or leader is None else leader
        survivors = members.others(victim)
        moment = _fail(members, failure, victim, cable)
        await members.until(
            lambda: all(_verdict(members, seer, victim, moment) for seer in survivors),  # noqa: B023
            HORIZON_SECONDS,
            f"{victim} is not declared dead by all",
        )
        verdicts = [_verdict(members, seer, victim, moment) - moment for seer in survivors]
        found.verdicts += verdicts
        found.first.append(min(verdicts))
        found.last.append(max(verdicts))
        if victim == leader:
            found.elected.append(await _elected(members, victim, moment + min(verdicts)))
        found.wrong += _false_deaths(members, survivors, moment, survivors)
        await _mend(members, failure, victim, cable)


async def measure_freezes(
    members: Members, rng: Random, anomalies: int, deadline: float
) -> tuple[int, list[str]]:
    """Freeze up to half of the members at any time, each for 0.1 to 2 s, at all moments.

    Returns:
        How many freezes there were, and who declared whom dead for one.
    """
    start = time.monotonic()
    count = 0
    frozen_until = dict.fromkeys(members.names, 0.0)

    async def keep_freezing(seed: int) -> None:
        nonlocal count
        own = Random(seed)
        while count < anomalies and time.monotonic() < deadline:
            now = time.monotonic()
            awake = [name for name, until in frozen_until.items() if until + 0.5 < now]
            if awake:
                name = own.choice(awake)
                seconds = own.choice((own.uniform(0.1, 2.0), 2.0))
                frozen_until[name] = now + seconds
                members[name].freeze(own.choice(("loop", "gil")), seconds)
                count += 1
                await asyncio.sleep(seconds)
            await asyncio.sleep(own.uniform(0.05, 0.5))

    async with asyncio.TaskGroup() as group:
        for _ in range(len(members.names) // 2):
            group.create_task(keep_freezing(rng.getrandbits(32)))
    await asyncio.sleep(5.0)  # verdicts that are still to come
    return count, _false_deaths(members, members.names, start, members.names)


def _fail(members: Members, failure: Failure, victim: str, cable: Cable | None) -> float:
    match failure:
        case Failure.KILL:
            return members[victim].signal(signal.SIGKILL)
        case Failure.FREEZE:
            return members[victim].signal(signal.SIGSTOP)
        case Failure.CABLE:
            assert cable is not None
            cable(victim, False)
            return time.monotonic()


async def _mend(members: Members, failure: Failure, victim: str, cable: Cable | None) -> None:
    match failure:
        case Failure.KILL:
            await members.restart(victim)
        case Failure.FREEZE:
            members[victim].signal(signal.SIGCONT)
        case Failure.CABLE:
            assert cable is not None
            cable(victim, True)
    await members.settled()


def _verdict(members: Members, seer: str, victim: str, moment: float) -> float:
    """When `seer` declared it dead, of the monotonic clock; 0 = not yet."""
    lines = members[seer].since(moment, "member")
    dead = (ln["at"] for ln in lines if ln["name"] == victim and ln["state"] == "dead")
    return float(next(dead, 0.0))


async def _elected(members: Members, victim: str, verdict: float) -> float:
    """Seconds from the verdict until all but the victim follow another one."""
    survivors = members.others(victim)

    def offices() -> set[tuple[str | None, int]]:
        return {members[seer].coordinator for seer in survivors}

    await members.until(
        lambda: len(offices()) == 1 and offices().pop()[0] in survivors,
        HORIZON_SECONDS,
        f"no coordinator after {victim}",
    )
    last = [members[seer].since(verdict - HORIZON_SECONDS, "coordinator")[-1] for seer in survivors]
    return max(0.0, max(line["at"] for line in last) - verdict)


def _false_deaths(
    members: Members, seers: list[str], moment: float, living: list[str]
) -> list[str]:
    return [
        f"{seer} declared {line['name']} dead: {line['why']}"
        for seer in seers
        for line in members[seer].since(moment, "member")
        if line["state"] == "dead" and line["name"] in living
    ]
