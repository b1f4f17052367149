"""Learning curves: by the delayed formula in plain torch, and by the real runtime.

Both train the same job from the same weights and must agree to the last bit; the formula takes one
device's time and needs no household, so it is what several seeds are computed with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from p2ptrain.model.capture import capture
from p2ptrain.observe.events import Eval
from p2ptrain.plan.plan import Plan
from p2ptrain.training import household_plan
from p2ptrain.training.job import Job
from p2ptrain.training.options import TrainOptions
from tests import delayed_reference
from tests.delayed_reference import Names, Recipe
from tests.integration.training.delayed import by_formula
from tests.integration.training.household import devices
from tests.reference import stack
from tools.async_learning import mnist
from tools.async_learning.settings import BATCH, Setting

EVALUATED_AT_ONCE = 250


@dataclass(frozen=True)
class Curve:
    """What was learned.

    Attributes:
        losses: of each mini-batch.
        accuracy: on the test images after each epoch.
        weights: SHA-256 of the model's final state.
    """

    losses: Sequence[float]
    accuracy: Sequence[float]
    weights: str

    def fields(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Course:
    """How long is trained; `updates` an epoch."""

    epochs: int
    updates: int = field(default=4000 // BATCH)


def job_of(setting: Setting, seed: int, course: Course) -> Job:
    """The same for every way to train it, but for how mini-batches are divided."""
    return mnist.job(seed, course.epochs, BATCH, setting.micro_batch)


def formula(setting: Setting, seed: int, course: Course, plan: Plan) -> Curve:
    """In plain torch, on one device that keeps all versions."""
    job = job_of(setting, seed, course)
    names = names_of(job, plan)
    found: list[float] = []

    def updated(updates: int) -> None:
        if updates % course.updates == 0:
            found.append(evaluate(job))

    borders = {epoch * course.updates: names for epoch in range(1, course.epochs)}
    steps = course.epochs * course.updates
    if setting.how is None:
        recipe = Recipe(
            lambda parameters: job.optimizer.build(parameters),
            BATCH,
            steps,
            lag=lambda stage, stages: 0,
            micro_batch=setting.micro_batch or None,
            seed=job.seed,
            schedule=job.lr_factor,
        )
        outcome = delayed_reference.train(job.model, job.data, job.loss, names, recipe, updated)
    else:
        outcome = by_formula(
            job,
            names,
            setting.how,
            steps,
            borders,
            micro_batch=setting.micro_batch or None,
            updated=updated,
        )
    return Curve(outcome.losses, found, digest(outcome.state_dict))


async def runtime(setting: Setting, seed: int, course: Course, plan: Plan) -> Curve:
    """By p2ptrain on devices in memory: all of it but the network."""
    job = job_of(setting, seed, course)
    options = TrainOptions(
        wait_for=setting.stages,
        planner="pp" if setting.stages > 1 else "single",
        asynchrony=setting.how,
        local=setting.stages == 1,
        replan=False,
    )
    async with devices(setting.stages, memory_bytes=None) as household:
        with patch.object(household_plan, "make_plan", lambda *_, **__: plan):
            await household.holder_run(job, options).run()
        accuracy = [e.metrics["accuracy"] for e in household.events if isinstance(e, Eval)]
        return Curve(household.losses, accuracy, digest(job.model.state_dict()))


def names_of(job: Job, plan: Plan) -> Names:
    """By stage of the plan, the names of the model's tensors."""
    example = stack([job.data[index] for index in range(2)])
    description = capture(job.model, job.loss, example, evaluation=True).description
    return [description.state_dict_names(*stage.units) for stage in plan.stages]


@torch.no_grad()
def evaluate(job: Job) -> float:
    """Accuracy on the test images, with the weights as they are."""
    model: nn.Module = job.model
    model.eval()
    samples = [job.eval_data[index] for index in range(len(job.eval_data))]
    right = 0.0
    for first in range(0, len(samples), EVALUATED_AT_ONCE):
        x, y = zip(*samples[first : first + EVALUATED_AT_ONCE], strict=True)
        target = torch.stack(y)
        right += mnist.accuracy(model(torch.stack(x)), target).item() * len(target)
    model.train()
    return right / len(samples)


def digest(state: Mapping[str, Tensor]) -> str:
    """Of all tensors, by name."""
    hashed = hashlib.sha256()
    for name in sorted(state):
        hashed.update(name.encode() + state[name].detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()
