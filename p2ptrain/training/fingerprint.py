"""Whether two runs of `train` are the same job, and whether two sets of first weights are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor

from p2ptrain.model.wire import pack
from p2ptrain.training.options import TrainOptions
from p2ptrain.training.preparation import Prepared

_JOB_DIGITS = 16


def fingerprint(prepared: Prepared, options: TrainOptions) -> str:
    """SHA-256, in hex, of everything that changes what a job computes.

    A script that is started again with other options, or changed, is another job. What cannot be
    looked into does not count: the content of the samples, and functions outside the model (the
    schedule, metrics) beyond their names.
    """
    job = prepared.job
    facts = {
        "model": prepared.captured.description.digest,
        "samples": len(prepared.samples),
        "evaluated": len(prepared.evaluation) if prepared.evaluation else 0,
        "metrics": sorted(map(str, job.metrics)),
        "batch_size": job.batch_size,
        "micro_batch": job.micro_batch,
        "steps": prepared.steps,
        "seed": job.seed,
        "optimizer": job.optimizer.to_fields(),
        "schedule": job.schedule is not None,
        "clip": job.clip_grad_norm,
        "skip_nonfinite": job.skip_nonfinite,
        "private": options.private,
        "planner": options.planner,
        "tiles": [options.grid, options.groups],
        "asynchrony": None if options.asynchrony is None else asdict(options.asynchrony),
        "chooses_mode": options.chooses_mode,
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
        chance: hex digits that tell it from other jobs of that fingerprint.
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
