"""The holder's way to a plan: wait for members, ask the coordinator, announce what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from p2ptrain.errors import LinkClosed, NotCoordinator, PeerError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Coordinator, MemberState, Mesh
from p2ptrain.model.description import ModelDescription
from p2ptrain.net.message import Message
from p2ptrain.observe.events import LeftOut, PlanEvent, PlannedDevice, PlannedStage
from p2ptrain.training.memory_needs import job_bytes
from p2ptrain.training.parts import limited
from p2ptrain.training.plan_request import PlanningAnswer, PlanningRequest
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, PLAN_REQUEST, SURVEY_LINKS
from p2ptrain.training.sharing import changes_of
from p2ptrain.training.waiting import changes, unless, until

log = get_logger(__name__)

PLAN_TIMEOUT_SECONDS = 900.0
SURVEY_TIMEOUT_SECONDS = 60.0
SETTLE_SECONDS = 1.5
OFFICE_TIMEOUT_SECONDS = 30.0
ASK_AGAIN_SECONDS = 2.0
"""After a link broke, or a device that it follows another, where no new coordinator is heard of."""
MOST_FRUITLESS = 15
"""Requests to one coordinator in one term."""
EPOCHS_A_REQUEST = 1000
"""More than the plans of one request: an abandoned one's numbers do not come again."""


async def wait_for_members(mesh: Mesh, count: int, timeout_seconds: float | None) -> None:
    """Wait until `count` devices are alive, this one included.

    Raises:
        UserError: not within `timeout_seconds`.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            await until(mesh, lambda: len(_alive(mesh)) >= count)
    except TimeoutError:
        names = ", ".join(sorted(_alive(mesh)))
        raise UserError(
            f"waited {timeout_seconds:g} s for {count} devices, but only {len(_alive(mesh))} "
            f"are here ({names}); start `p2ptrain join` on the others, or ask `p2ptrain doctor` "
            "why they are not seen"
        ) from None


async def settle(mesh: Mesh, seconds: float = SETTLE_SECONDS) -> None:
    """Wait until the membership has not changed for `seconds`."""
    with changes(mesh) as changed:
        while True:
            changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await changed.wait()
            except TimeoutError:
                return


async def survey_links(mesh: Mesh) -> None:
    """Have the links between the others measured while this device still exports its model."""
    try:
        coordinator = await _office(mesh)
        message = Message(SURVEY_LINKS)
        await mesh.call(coordinator.id, message, timeout_seconds=SURVEY_TIMEOUT_SECONDS)
    except (PeerError, TimeoutError) as error:
        log.info("early_survey_failed", why=str(error))  # the plan's own survey follows


async def request_plan(
    mesh: Mesh, request: PlanningRequest, let_go: Callable[[str], Awaitable[None]]
) -> PlanningAnswer:
    """Ask whoever coordinates, and the next one where the office changes hands meanwhile.

    Args:
        let_go: (why) frees what an abandoned request has made ready.

    Raises:
        PlanError: nothing fits.
        PeerError: no coordinator could be reached.
    """
    asked: tuple[str, int] | None = None
    fruitless = 0
    request = replace(request, epoch=request.epoch + 1)  # devices may know the last one
    while True:
        office = await _office(mesh)
        term = office.id, office.term
        asked, fruitless = term, fruitless + 1 if term == asked else 1
        over = partial(_is_over, mesh, office)
        try:
            answer = await unless(mesh, over, _ask(mesh, office, request))
            if answer is not None:
                return answer
            why = f"{office.name} does not coordinate any more"
        except (LinkClosed, NotCoordinator) as error:
            if fruitless >= MOST_FRUITLESS:
                raise
            why = str(error)
            await _wait_for_news(mesh, over)
        log.info("asking_for_a_plan_again", why=why)
        await let_go(f"{why}: planned again")
        request = replace(request, epoch=request.epoch + EPOCHS_A_REQUEST)


async def _ask(mesh: Mesh, office: Coordinator, request: PlanningRequest) -> PlanningAnswer:
    reply = await mesh.call(
        office.id,
        Message(PLAN_REQUEST, {}, (memoryview(request.to_bytes()),)),
        timeout_seconds=PLAN_TIMEOUT_SECONDS,
        reply_parts=limited(BLOB_LIMIT_BYTES),
    )
    return PlanningAnswer.from_bytes(reply.parts[0])


def plan_event(answer: PlanningAnswer, description: ModelDescription, reason: str) -> PlanEvent:
    """The event that announces a plan."""
    plan: dict[str, Any] = dict(answer.plan)
    return PlanEvent(
        epoch=answer.assignment.key.epoch,
        reason=reason,
        stages=tuple(_stage(stage, description) for stage in plan["stages"]),
        micro_batch=plan["micro_batch"],
        micro_batches=plan["micro_batches"],
        predicted_samples_per_s=plan["predicted"]["samples_per_s"],
        left_out=tuple(LeftOut(out["name"], out["reason"]) for out in plan["left_out"]),
        changes_results=changes_of(plan),
        wire=answer.assignment.wire.value,
        predicted_peak_bytes={
            name: job_bytes(peak, plan["taken_bytes"].get(name, 0))
            for name, peak in plan["predicted"]["peak_bytes"].items()
        },
    )


def _stage(stage: dict[str, Any], description: ModelDescription) -> PlannedStage:
    first, end = stage["units"]
    return PlannedStage(
        units=(first, end),
        devices=tuple(PlannedDevice(d["name"], d["share"]) for d in stage["devices"]),
        parameters=tuple(description.state_dict_names(first, end)),
        allocation=stage.get("allocation", "samples"),
        warmup=stage["warmup"],
    )


async def _office(mesh: Mesh) -> Coordinator:
    """Who coordinates, once there is somebody."""
    try:
        async with asyncio.timeout(OFFICE_TIMEOUT_SECONDS):
            await until(mesh, lambda: mesh.coordinator is not None)
    except TimeoutError:
        raise PeerError("the devices did not agree on a coordinator") from None
    assert mesh.coordinator is not None
    return mesh.coordinator


def _is_over(mesh: Mesh, office: Coordinator) -> bool:
    """Whether another device coordinates now, or this one in another term, or none."""
    now = mesh.coordinator
    return now is None or (now.id, now.term) != (office.id, office.term)


async def _wait_for_news(mesh: Mesh, over: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(ASK_AGAIN_SECONDS):
            await until(mesh, over)
    except TimeoutError:
        log.info("coordinator_unchanged")


def _alive(mesh: Mesh) -> list[str]:
    return [m.name for m in mesh.members.values() if m.state is MemberState.ALIVE]
