"""One job trained twice: by p2ptrain on several devices in memory, and by plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import (
    SGD,
)
from tests.integration.training.household import devices
from tests.support import reference, zoo
from tests.support.reference import Outcome


@dataclass(frozen=True)
class Case:
    """A job and how it is cut.

    Attributes:
        model: name in the zoo.
        decay: the schedule's factor is decay ** update; 1.0 means no schedule.
        private: the device with the data has the first and the last stage.
    """

    model: str
    devices: int
    micro_batch: int = 4
    steps: int = 30
    epochs: int = 1000
    batch_size: int = 16
    optimizer: Any = SGD(lr=0.05, momentum=0.9, weight_decay=1e-4)  # noqa: RUF009
    clip_grad_norm: float | None = None
    decay: float = 1.0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    private: bool = False

    def __str__(self) -> str:
        extras = [
            f"clip {self.clip_grad_norm}" if self.clip_grad_norm else "",
            f"decay {self.decay}" if self.decay != 1.0 else "",
            "float64" if self.dtype is torch.float64 else "",
            "private" if self.private else "",
        ]
        told = f"{self.model} on {self.devices}, micro-batch {self.micro_batch}"
        return ", ".join([told, self.optimizer.name, *filter(None, extras)])

    def schedule(self, update: int) -> float:
        """Factor on the learning rate."""
        return self.decay**update


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences of two runs; 0.0 means bit-identical."""

    loss: float
    state: float


@dataclass(frozen=True)
class HouseholdRun:
    """What a household gave.

    Attributes:
        tied: trainable tensors that lay in more than one stage.
        changes: how the plan was said to change results.
    """

    outcome: Outcome
    tied: frozenset[str]
    changes: tuple[str, ...]


async def with_p2ptrain(case: Case) -> Outcome:
    """Train with the whole runtime, on devices that share this process."""
    return (await household_run(case, zoo.make(case.model, dtype=case.dtype))).outcome


async def household_run(case: Case, made: zoo.Made) -> HouseholdRun:
    """As `with_p2ptrain`, on a model of one's own; says what was tied across stages."""
    async with devices(case.devices) as household:
        options = TrainOptions(
            wait_for=case.devices, planner="pp", steps=case.steps, private=case.private
        )
        await household.holder_run(job_of(case, made), options).run()
    assert len(household.plan.stages) == case.devices + case.private
    places = Counter(name for stage in household.plan.stages for name in stage.parameters)
    trainable = {
        name
        for name, parameter in made.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    tied = frozenset(name for name, count in places.items() if count > 1 and name in trainable)
    changes = household.plan.changes_results
    return HouseholdRun(outcome_of(household.losses, made), tied, changes)


def job_of(case: Case, made: zoo.Made) -> Job:
    """The case as a user would write it."""
    return Job(
        model=made.model,
        data=made.data,
        loss=made.loss,
        optimizer=case.optimizer,
        batch_size=case.batch_size,
        micro_batch=case.micro_batch,
        epochs=case.epochs,
        seed=case.seed,
        schedule=None if case.decay == 1.0 else case.schedule,
        clip_grad_norm=case.clip_grad_norm,
    )


def outcome_of(losses: Sequence[float], made: zoo.Made) -> Outcome:
    """The losses, and a copy of the trained model's state."""
    state = made.model.state_dict()
    return Outcome(list(losses), {name: tensor.detach().clone() for name, tensor in state.items()})


def plain_torch(
    case: Case,
    made: zoo.Made | None = None,
    before_update: Callable[[int, torch.nn.Module], object] = lambda step, model: None,
) -> Outcome:
    """Train with the plain loop of the contract."""
    made = made or zoo.make(case.model, dtype=case.dtype)
    return by_plain_torch(job_of(case, made), case.steps, before_update)


def by_plain_torch(
    job: Job,
    steps: int | None = None,
    before_update: Callable[[int, torch.nn.Module], object] = lambda step, model: None,
) -> Outcome:
    """Train the job's model in place, without p2ptrain; only what the plain loop knows counts."""
    recipe = reference.Recipe(
        optimizer=lambda parameters: form_of(job).build(list(parameters)),
        batch_size=job.batch_size,
        micro_batch=job.micro_batch,
        epochs=job.epochs,
        steps=steps,
        seed=job.seed,
        schedule=job.schedule,
        clip_grad_norm=job.clip_grad_norm,
        before_update=before_update,
    )
    return reference.train(job.model, job.data, job.loss, recipe)


def form_of(job: Job) -> OptimizerSpec:
    """The job's optimizer, which is not torch's object."""
    assert isinstance(job.optimizer, OptimizerSpec)
    return job.optimizer


def difference(one: Outcome, other: Outcome) -> Difference:
    """Compare losses and every tensor of the state_dict."""
    assert len(one.losses) == len(other.losses)
    assert one.state_dict.keys() == other.state_dict.keys()
    losses = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    return Difference(
        max(losses),
        max(_distance(one.state_dict[name], other.state_dict[name]) for name in one.state_dict),
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    if not one.numel():
        return 0.0
    return float((one.double() - other.double()).abs().max()) or float("nan")
