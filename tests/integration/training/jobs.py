"""Jobs that take well under a second, and what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from p2ptrain.events import Event, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, Adam
from tests.integration.training.household import Devices
from tests.support import zoo
from tests.support.curves import by_plain_torch
from tests.support.reference import Outcome

STEPS = 12
"""Four epochs of 3 updates: `momentum_job` and `one_stage_each` as they are called mostly."""


def make_job(name: str = "mlp", **changes: object) -> Job:
    """One of the zoo: 48 samples, 3 updates of 4 micro-batches an epoch."""
    made = zoo.make(name)
    settings: dict[str, object] = {
        "model": made.model,
        "optimizer": Adam(lr=0.01),
        "batch_size": 16,
        "micro_batch": 4,
        "epochs": 2,
        **changes,
    }
    return Job(data=made.data, loss=made.loss, **settings)  # type: ignore[arg-type]


def momentum_job(epochs: int = 4, name: str = "mlp") -> Job:
    """A chain whose optimizer has a state, so that an update lost or made twice shows for ever."""
    return make_job(name, optimizer=SGD(lr=0.05, momentum=0.9), epochs=epochs)


class _Root(torch.nn.Module):
    """Not a number for negative inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x)


def job_that_ends_in_nan(micro_batch: int | None = None) -> Job:
    """Its first loss is not a number: the root gets nothing but -1."""
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(4, 4), linear(4, 4), _Root(), linear(4, 4), linear(4, 3))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.fill_(-1.0)
    data = [(torch.ones(4), 0)] * 32
    sgd = SGD(lr=0.1)
    return Job(model, data, cross_entropy, optimizer=sgd, batch_size=8, micro_batch=micro_batch)


def one_stage_each(count: int, steps: int = STEPS) -> TrainOptions:
    """A straight pipeline over so many devices."""
    return TrainOptions(wait_for=count, planner="pp", steps=steps)


def on_step(household: Devices, step: int, act: Callable[[], object]) -> Callable[[Event], None]:
    """A listener that calls `act` once when `step` is reported."""

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step) and event.step == step:
            act()

    return listen


def undisturbed(job: Job, steps: int = STEPS) -> Outcome:
    """What training must come to, with any death: one device's curve and weights, by plain torch.

    Only for models without dropout. `job` is trained: it is another one's of the same weights.
    """
    return by_plain_torch(job, steps)


def steps_of(household: Devices) -> list[int]:
    """The numbers of the steps that people heard of."""
    return [event.step for event in household.events if isinstance(event, Step)]


def assert_undisturbed(household: Devices, job: Job, wanted: Outcome) -> None:
    """Every step was reported once and in order, and nothing differs by a bit."""
    assert steps_of(household) == list(range(1, len(wanted.losses) + 1))
    assert household.losses == wanted.losses
    assert_same_weights(job, wanted)


def assert_same_weights(job: Job, wanted: Outcome) -> None:
    """To the bit."""
    for name, tensor in wanted.state_dict.items():
        assert torch.equal(tensor, job.model.state_dict()[name]), name
