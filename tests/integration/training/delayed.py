"""Asynchronous jobs on devices in memory, and what the papers' formulas make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from p2ptrain.observe.events import Event, PlanEvent, Step
from p2ptrain.plan.versions import Weights
from p2ptrain.training.asynchronous.delays import Asynchrony
from p2ptrain.training.job import SGD, Job
from p2ptrain.training.options import TrainOptions
from tests import delayed_reference, zoo
from tests.delayed_reference import Names, Recipe
from tests.integration.training.household import Devices
from tests.integration.training.jobs import assert_same_weights, make_job
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
    devices: Mapping[int, Sequence[int]] | None = None,
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
        devices=devices or {},
        micro_batch=micro_batch,
        aggregate=how.aggregate,
        stashes=how.weights is not Weights.UNSTASHED,
        seed=job.seed,
        schedule=job.lr_factor,
        empty=empty or {},
    )
    data: Sequence[zoo.Sample] = job.data  # type: ignore[assignment]
    return delayed_reference.train(job.model, data, job.loss, names, recipe)


class Epochs:
    """The plans of a job as they came into force: what each began with, and how it was cut.

    Attributes:
        begun: (updates behind the state, steps told before, names by stage).
    """

    def __init__(self, household: Devices) -> None:
        self.begun: list[tuple[int, int, Names]] = []
        self._household = household

    def note(self, event: Event) -> None:
        """Before the event stands among the household's: a step, perhaps the first of a plan."""
        events = self._household.events
        plans = [earlier for earlier in events if isinstance(earlier, PlanEvent)]
        if isinstance(event, Step) and len(plans) > len(self.begun):
            engagement = self._household.members["a"].service.engagement
            assert engagement is not None
            names = [list(stage.parameters) for stage in plans[-1].stages]
            self.begun.append((engagement.assignment.version.step, event.step - 1, names))

    def assert_by_formula(
        self, job: Job, make: Callable[[], Job], how: Asynchrony, steps: int
    ) -> None:
        """Every step was told once, with the loss that the formula gives with these cuts."""
        told = [event.step for event in self._household.events if isinstance(event, Step)]
        assert told == list(range(1, steps + 1))
        wanted: list[float] = []
        empty: dict[int, Names] = {}
        for number, (version, before, names) in enumerate(self.begun):
            last = number == len(self.begun) - 1
            end = steps if last else self.begun[number + 1][1]
            empty = {v: cut for v, cut in empty.items() if v < version} | {version: names}
            outcome = by_formula(make(), names, how, end, empty)
            wanted = wanted[:before] + outcome.losses[before:]
        assert self._household.losses == wanted
        assert_same_weights(job, outcome)
