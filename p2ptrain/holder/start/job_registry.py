"""Asks the members what they keep of this device's jobs, and ends jobs that are over.

Also compares jobs: whether two runs of `train` are the same job, with the same first weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict

from torch import Tensor

from p2ptrain.errors import Error, PeerError
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import MemberState, Mesh
from p2ptrain.mesh.waiting import wait_within
from p2ptrain.messages.job_requests import JobEnd, JobKept
from p2ptrain.messages.kinds import END, FIND
from p2ptrain.model.wire.tensor_codec import pack
from p2ptrain.net.message import Message
from p2ptrain.recovery.resume_decision import KeptJob

log = get_logger(__name__)

REACHABLE = (MemberState.ALIVE, MemberState.SUSPECT)


async def wait_for_devices(mesh: Mesh, devices: Collection[str], seconds: float) -> None:
    """Wait until these are alive, at most so long."""

    def are_here() -> bool:
        return all(is_alive(mesh, device) for device in devices)

    if not await wait_within(mesh, are_here, seconds):
        log.info("not_all_here", missing=[d[:12] for d in devices if not is_alive(mesh, d)])


def is_alive(mesh: Mesh, device: str) -> bool:
    """Whether this device sees that one alive."""
    member = mesh.members.get(device)
    return member is not None and member.state is MemberState.ALIVE


async def ask_unfinished_jobs(mesh: Mesh, seconds: float) -> dict[str, KeptJob | None]:
    """What every member keeps of a job of this device; who does not answer is left out."""
    members = [d for d in mesh.members if d != mesh.self_id and is_alive(mesh, d)]
    answers = await asyncio.gather(*(_ask(mesh, member, seconds) for member in members))
    return {device: kept for device, (heard, kept) in zip(members, answers, strict=True) if heard}


async def _ask(mesh: Mesh, member: str, seconds: float) -> tuple[bool, KeptJob | None]:
    try:
        reply = await mesh.call(member, Message(FIND), timeout_seconds=seconds)
        kept = JobKept.read(reply.fields)
        if kept.job is None or kept.newest is None:
            return True, None
        return True, KeptJob(kept.job, kept.newest)
    except (Error, TimeoutError) as error:
        log.info("not_found_out", member=member[:12], why=str(error))
        return False, None


async def end_other_jobs(mesh: Mesh, member: str, job: str, seconds: float) -> None:
    """Free a member that comes late from an older job of this device."""
    _, kept = await _ask(mesh, member, seconds)
    if kept is not None and kept.job != job:
        await _end_there(mesh, member, kept.job, seconds)


async def end_earlier_jobs(mesh: Mesh, jobs: Collection[str], seconds: float) -> None:
    """Free every member from these jobs of an earlier process, before they are asked for more."""
    members = [d for d in mesh.members if d != mesh.self_id and is_alive(mesh, d)]
    ending = (_end_there(mesh, m, job, seconds) for m in members for job in sorted(jobs))
    await asyncio.gather(*ending)


async def _end_there(mesh: Mesh, member: str, job: str, seconds: float) -> None:
    message = _end(job, "its device trains another job, or begins it again")
    try:
        await mesh.call(member, message, timeout_seconds=seconds)
    except (Error, TimeoutError) as error:
        log.info("end_not_delivered", member=member[:12], why=str(error))


async def end_job(mesh: Mesh, job: str, reason: str, seconds: float) -> None:
    """Free every member from a job, also those that an abandoned plan had made ready.

    A member out of reach now learns it when this device leaves, or at its next job.
    """
    members = [m.id for m in mesh.members.values() if m.state in REACHABLE]
    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(
                *(_send_or_log(mesh, member, _end(job, reason)) for member in members)
            )
    except TimeoutError:
        log.info("end_not_delivered", reason=reason)


def _end(job: str, reason: str) -> Message:
    return Message(END, JobEnd(job, reason).fields())


async def _send_or_log(mesh: Mesh, member: str, message: Message) -> None:
    try:
        await mesh.send(member, message)
    except PeerError as error:
        log.info("end_not_delivered", member=member[:12], why=str(error))


_JOB_DIGITS = 16


def job_fingerprint(prepared: PreparedJob, options: TrainOptions) -> str:
    """SHA-256, in hex, of everything that changes what a job computes.

    A script that is started again with other options, or changed, is another job. What cannot be
    looked into does not count: the content of the samples, and functions outside the model (the
    schedule, metrics) beyond their names.
    """
    job = prepared.job
    facts = {
        "model": prepared.captured.description.digest,
        "samples": prepared.data_samples,
        "evaluated": 0 if prepared.evaluation is None else prepared.evaluation.samples,
        "metrics": sorted(map(str, job.metrics)),
        "batch_size": job.batch_size,
        "micro_batch": job.micro_batch,
        "steps": [prepared.steps, job.epochs],
        "seed": job.seed,
        "optimizer": repr(prepared.optimizer),
        "schedule": job.schedule is not None,
        "scheduler": [job.numbers.facts, job.scheduler_interval, job.scheduler_metric],
        "clip": job.clip_grad_norm,
        "skip_nonfinite": job.skip_nonfinite,
        "eval_with_ema": job.eval_with_ema,
        "private": options.private,
        "planner": options.planner,
        "tiles": [options.grid, options.groups],
        "asynchrony": None if options.asynchrony is None else asdict(options.asynchrony),
        "chooses_mode": options.mode == "auto",
        "ftpipehd": None if options.as_ftpipehd is None else asdict(options.as_ftpipehd),
        "wire": options.wire.value,
        "resume": None if options.resume is None else str(options.resume.absolute()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def job_prefix(mark: str) -> str:
    """What the ids of all jobs with that fingerprint begin with."""
    return f"{mark[:_JOB_DIGITS]}-"


def job_id(mark: str, chance: str) -> str:
    """A job's id; members that are asked for their jobs need not know the fingerprint.

    Args:
        mark: its fingerprint.
        chance: hex digits that distinguish it from other jobs of that fingerprint.
    """
    return f"{job_prefix(mark)}{chance}"


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, of tensors with their names and layouts.

    0.6 ns a byte where the processor has instructions for it: call it off the event loop.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        packed = pack(state[name])
        digest.update(json.dumps([name, packed.meta[:3]]).encode())
        digest.update(packed.part)
    return digest.hexdigest()
