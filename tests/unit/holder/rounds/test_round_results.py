"""Who can tell where values stopped being finite is heard, whatever the others do."""

from __future__ import annotations

import asyncio

from p2ptrain.errors import InternalError, PeerError
from p2ptrain.holder.rounds.round_results import diagnose
from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.messages.findings import NonFiniteFinding

GROUP = StageAssignment(0, 2, 2, ("a", "b", "c"), (1, 1, 1))
LAST = StageAssignment(2, 4, 1, ("d",), (1,))


def finding(stage: int, device: str) -> NonFiniteFinding:
    return NonFiniteFinding((device,), stage, 0, 0, False)


async def test_a_device_that_waits_for_the_one_that_failed_keeps_nobody_waiting() -> None:
    stuck = asyncio.Event()
    given_up: list[str] = []

    async def ask(stage: int, device: str) -> NonFiniteFinding | None:
        if device == "a":
            try:
                await stuck.wait()
            except asyncio.CancelledError:
                given_up.append(device)
                raise
        return finding(stage, device) if device == "c" else None

    assert await diagnose((GROUP, LAST), ask) == finding(0, "c")
    assert given_up == ["a"]


async def test_a_device_that_does_not_answer_is_not_the_end_of_it() -> None:
    asked: list[str] = []

    async def ask(stage: int, device: str) -> NonFiniteFinding | None:
        asked.append(device)
        if device == "a":
            raise PeerError("gone")
        if device == "b":
            raise TimeoutError
        if device == "c":
            raise InternalError("c failed to handle it")
        return finding(stage, device) if device == "d" else None

    assert await diagnose((GROUP, LAST), ask) == finding(1, "d")
    assert asked == ["a", "b", "c", "d"]


async def test_where_nobody_has_found_anything_nothing_is_said() -> None:
    async def ask(stage: int, device: str) -> NonFiniteFinding | None:
        return None

    assert await diagnose((GROUP, LAST), ask) is None
