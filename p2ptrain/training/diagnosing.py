"""Asking all devices of a job where a micro-batch stopped being finite, stage by stage.

A device of a group may be waiting for the sums of one that has failed, in the thread that would
look: so all of a stage are asked at once, and what one has found is not kept back for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from p2ptrain.errors import Error
from p2ptrain.logs import get_logger
from p2ptrain.training.assignment import StagePlace
from p2ptrain.training.finding import Finding, earliest
from p2ptrain.training.scope import task_scope

log = get_logger(__name__)

Ask: TypeAlias = Callable[[int, str], Awaitable[Finding | None]]
"""Stage and device -> what that device has found; raises Error, TimeoutError."""


async def diagnose(stages: Sequence[StagePlace], ask: Ask) -> Finding | None:
    """The first units whose values are not finite, if a device can still tell."""
    for index, place in enumerate(stages):
        found = await _of_stage(index, place, ask)
        if found:
            return earliest(found)
    return None


async def _of_stage(index: int, place: StagePlace, ask: Ask) -> list[Finding]:
    """One of them, but of tiles all, in the stage's order: these see only their parts of maps."""
    one_is_enough = place.tiling is None
    async with task_scope() as scope:
        asked = [scope.create_task(_asked(index, device, ask)) for device in place.devices]
        for answer in asyncio.as_completed(asked):
            if await answer is not None and one_is_enough:
                break
        answers = [task.result() for task in asked if task.done()]
        for task in asked:
            task.cancel()
    return [finding for finding in answers if finding is not None]


async def _asked(index: int, device: str, ask: Ask) -> Finding | None:
    """None also where it does not answer: the loss is reported all the same."""
    try:
        return await ask(index, device)
    except (Error, TimeoutError) as error:
        log.info("not_diagnosed", device=device[:12], why=str(error) or "it took too long")
        return None
