"""Asynchronous jobs on devices in memory, and what the papers' formulas make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from p2ptrain.plan.versions import Weights
from p2ptrain.training.asynchronous.delays import Asynchrony
from p2ptrain.training.job import SGD, Job
from p2ptrain.training.options import TrainOptions
from tests import delayed_reference, zoo
from tests.delayed_reference import Names, Recipe
from tests.integration.training.household import Devices
from tests.integration.training.jobs import make_job
from tests.reference import Outcome

OPTIMIZER = SGD(lr=0.02, momentum=0.9, weight_decay=1e-4)
BATCH = 8


def delayed_job(name: str = "mlp", **changes: object) -> Job:
    """48 samples, 6 mini-batches an epoch."""
    settings: dict[str, object] = {"batch_size": BATCH, "micro_batch": None, "epochs": 1000}
    return make_job(name, **{"optimizer": OPTIMIZER, **settings, **changes})


def options(count: int, how: Asynchrony, steps: int, **more: object) -> TrainOptions:
    """A straight pipeline over so many devices."""
    chosen: dict[str, object] = {"wait_for": count, "planner": "pp", "steps": steps, **more}
    return TrainOptions(asynchrony=how, **chosen)  # type: ignore[arg-type]


def cut_of(household: Devices) -> Names:
    """By stage of the newest plan, the names of the user's tensors there."""
    return [list(stage.parameters) for stage in household.plan.stages]


def by_formula(
    job: Job,
    names: Names,
    how: Asynchrony,
    steps: int,
    empty: Mapping[int, Names] | None = None,
    micro_batch: int | None = None,
) -> Outcome:
    """Train `job`, another one's of the same weights, in plain torch with the same delays."""
    lags: dict[Weights, Callable[[int, int], int]] = {
        Weights.STASHED: lambda stage, n: n - 1 - stage,
        Weights.UNSTASHED: lambda stage, n: n - 1 - stage,
        Weights.VERTICAL: lambda stage, n: n - 1,
        Weights.DOUBLE: lambda stage, n: min(n - 1, 1),
    }
    recipe = Recipe(
        lambda parameters: job.optimizer.build(parameters),
        job.batch_size,
        steps,
        lags[how.weights],
        micro_batch=micro_batch,
        aggregate=how.aggregate,
        stashes=how.weights is not Weights.UNSTASHED,
        seed=job.seed,
        schedule=job.lr_factor,
        empty=empty or {},
    )
    data: Sequence[zoo.Sample] = job.data  # type: ignore[assignment]
    return delayed_reference.train(job.model, data, job.loss, names, recipe)
