"""Asking the members what they keep of this device's jobs, and ending those that are over."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from p2ptrain.errors import Error, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import MemberState, Mesh
from p2ptrain.net.message import Message
from p2ptrain.training.protocol import END, FIND, text
from p2ptrain.training.recovery.going_on import Kept
from p2ptrain.training.recovery.holdings import read_version
from p2ptrain.training.waiting import within

log = get_logger(__name__)

FIND_TIMEOUT_SECONDS = 2.0
END_TIMEOUT_SECONDS = 2.0
REACHABLE = (MemberState.ALIVE, MemberState.SUSPECT)


async def wait_for(mesh: Mesh, devices: Collection[str], seconds: float) -> None:
    """Wait until these are alive, at most so long."""

    def are_here() -> bool:
        return all(is_alive(mesh, device) for device in devices)

    if not await within(mesh, are_here, seconds):
        log.info("not_all_here", missing=[d[:12] for d in devices if not is_alive(mesh, d)])


def is_alive(mesh: Mesh, device: str) -> bool:
    """Whether this device sees that one alive."""
    member = mesh.members.get(device)
    return member is not None and member.state is MemberState.ALIVE


async def ask_all(mesh: Mesh) -> dict[str, Kept | None]:
    """What every member keeps of a job of this device; who does not answer is left out."""
    members = [d for d in mesh.members if d != mesh.self_id and is_alive(mesh, d)]
    answers = await asyncio.gather(*(_ask(mesh, member) for member in members))
    return {device: kept for device, (heard, kept) in zip(members, answers, strict=True) if heard}


async def _ask(mesh: Mesh, member: str) -> tuple[bool, Kept | None]:
    try:
        reply = await mesh.call(member, Message(FIND), timeout_seconds=FIND_TIMEOUT_SECONDS)
        if "job" not in reply.fields:
            return True, None
        return True, Kept(text(reply.fields, "job", 64), read_version(reply.fields.get("newest")))
    except (Error, TimeoutError) as error:
        log.info("not_found_out", member=member[:12], why=str(error))
        return False, None


async def end_others(mesh: Mesh, member: str, job: str) -> None:
    """Free a member that comes late from an older job of this device."""
    _, kept = await _ask(mesh, member)
    if kept is not None and kept.job != job:
        await _end_there(mesh, member, kept.job)


async def end_old(mesh: Mesh, jobs: Collection[str]) -> None:
    """Free every member from these jobs of an earlier process, before they are asked for more."""
    members = [d for d in mesh.members if d != mesh.self_id and is_alive(mesh, d)]
    await asyncio.gather(*(_end_there(mesh, m, job) for m in members for job in sorted(jobs)))


async def _end_there(mesh: Mesh, member: str, job: str) -> None:
    message = _end(job, "its device trains another job, or begins it anew")
    try:
        await mesh.call(member, message, timeout_seconds=END_TIMEOUT_SECONDS)
    except (Error, TimeoutError) as error:
        log.info("end_not_delivered", member=member[:12], why=str(error))


async def end(mesh: Mesh, job: str, reason: str) -> None:
    """Free every member from a job, also those that an abandoned plan had made ready.

    Who is out of reach now hears of it when this device leaves, or is asked by its next job.
    """
    members = [m.id for m in mesh.members.values() if m.state in REACHABLE]
    try:
        async with asyncio.timeout(END_TIMEOUT_SECONDS):
            await asyncio.gather(*(_tell(mesh, member, _end(job, reason)) for member in members))
    except TimeoutError:
        log.info("end_not_delivered", reason=reason)


def _end(job: str, reason: str) -> Message:
    return Message(END, {"job": job, "reason": reason[:1000]})


async def _tell(mesh: Mesh, member: str, message: Message) -> None:
    try:
        await mesh.send(member, message)
    except PeerError as error:
        log.info("end_not_delivered", member=member[:12], why=str(error))
