"""The plan that the user gives (`train --plan`), and the job with that plan's micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from p2ptrain.errors import OptionError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.planning_files import read_plan
from p2ptrain.plan.types.plan import Plan


def given_plan(path: Path | None, job: Job, how: AsyncOptions | None) -> tuple[Plan | None, Job]:
    """The plan in that file, and `job` with its micro-batches where the job names none.

    Raises:
        OptionError: it is no plan, or has other micro-batches than the job.
    """
    if path is None:
        return None, job
    plan = read_plan(path, job.batch_size)
    if how is not None:
        return plan, job
    size = job.fixed_micro_batch
    if size and size != plan.micro_batch:
        raise OptionError(
            f"{path}: the plan has micro-batches of {plan.micro_batch} samples, and the job of "
            f"{size}: plan with --micro-batch {size}, or leave micro_batch out of the job"
        )
    return plan, replace(job, micro_batch=plan.micro_batch)
