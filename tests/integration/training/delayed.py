"""Asynchronous jobs on devices in memory, and what the papers' formulas make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from torch.nn import Parameter
from torch.optim import Optimizer

from p2ptrain.events import Step
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.holder.rounds.generation_runner import GenerationRunner
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.assignment import Assignment
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.plan.types.weight_versions import Weights
from tests.integration.training.household import Devices
from tests.integration.training.jobs import assert_same_weights, make_job
from tests.support import delayed_reference, zoo
from tests.support.curves import form_of
from tests.support.delayed_pipelines import LAGS
from tests.support.delayed_reference import Names, Recipe
from tests.support.reference import Outcome

OPTIMIZER = SGD(lr=0.02, momentum=0.9, weight_decay=1e-4)
BATCH = 8


def delayed_job(name: str = "mlp", **changes: object) -> Job:
    """48 samples, 6 mini-batches an epoch."""
    settings: dict[str, object] = {"batch_size": BATCH, "micro_batch": None, "epochs": 1000}
    return make_job(name, **{"optimizer": OPTIMIZER, **settings, **changes})


def options(count: int, how: AsyncOptions, steps: int, **more: object) -> TrainOptions:
    """A straight pipeline over so many devices."""
    chosen: dict[str, object] = {"wait_for": count, "planner": "pp", "steps": steps}
    chosen |= {"mode": "async", **more}
    return TrainOptions(asynchrony=how, **chosen)  # type: ignore[arg-type]


def cut_of(household: Devices) -> Names:
    """By stage of the newest plan, the names of the user's tensors there."""
    return [list(stage.parameters) for stage in household.plan.stages]


def by_formula(
    job: Job,
    names: Names,
    how: AsyncOptions,
    steps: int,
    empty: Mapping[int, Names] | None = None,
    micro_batch: int | None = None,
    devices: Mapping[int, Sequence[int]] | None = None,
    updated: Callable[[int], object] = lambda updates: None,
    schedule: Callable[[int], float] = lambda update: 1.0,
) -> Outcome:
    """Train `job`, another one's of the same weights, in plain torch with the same delays."""
    recipe = Recipe(
        lambda parameters: optimizer_of(job, parameters),
        job.batch_size,
        steps,
        LAGS[how.weights],
        devices=devices or {},
        micro_batch=micro_batch,
        aggregate=how.aggregate,
        stashes=how.weights is not Weights.UNSTASHED,
        seed=job.seed,
        schedule=job.schedule or schedule,
        empty=empty or {},
    )
    data: Sequence[zoo.Sample] = job.data  # type: ignore[assignment]
    return delayed_reference.train(job.model, data, job.loss, names, recipe, updated)


def optimizer_of(job: Job, parameters: Sequence[Parameter]) -> Optimizer:
    """The job's own, where it is torch's."""
    return job.optimizer if isinstance(job.optimizer, Optimizer) else form_of(job).build(parameters)


class Generations:
    """The plans of a job as they came into force: what each began with, and how it was cut.

    Attributes:
        begun: (updates behind the state, steps reported before, names by stage).
    """

    def __init__(self, household: Devices) -> None:
        self.begun: list[tuple[int, int, Names]] = []
        self._devices: list[Sequence[int]] = []  # by plan, of each stage
        self._household = household

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note those of the job that runs meanwhile."""
        begin, generations = GenerationRunner.begin, self

        def noted(runs: GenerationRunner, answer: ReconfigureReply, alive: frozenset[str]) -> None:
            generations.note(answer.assignment)
            begin(runs, answer, alive)

        with patch.object(GenerationRunner, "begin", noted):
            yield

    def note(self, assignment: Assignment) -> None:
        events = self._household.events
        told = sum(isinstance(event, Step) for event in events)
        self.begun.append((assignment.version.step, told, cut_of(self._household)))
        self._devices.append([len(place.devices) for place in assignment.stages])

    def assert_by_formula(
        self, job: Job, make: Callable[[], Job], how: AsyncOptions, steps: int
    ) -> None:
        """Every step was reported once, with the loss that the formula gives with these cuts."""
        told = [event.step for event in self._household.events if isinstance(event, Step)]
        assert told == list(range(1, steps + 1))
        wanted: list[float] = []
        empty: dict[int, Names] = {}
        counts: dict[int, Sequence[int]] = {}
        for number, (version, before, names) in enumerate(self.begun):
            last = number == len(self.begun) - 1
            end = steps if last else self.begun[number + 1][1]
            empty = {v: cut for v, cut in empty.items() if v < version} | {version: names}
            counts = {v: had for v, had in counts.items() if v < version}
            counts[version] = self._devices[number]
            outcome = by_formula(make(), names, how, end, empty, devices=_groups(counts, how))
            wanted = wanted[:before] + outcome.losses[before:]
        assert self._household.losses == wanted
        assert_same_weights(job, outcome)


def _groups(counts: Mapping[int, Sequence[int]], how: AsyncOptions) -> Mapping[int, Sequence[int]]:
    """Only where devices may take turns does their number count, and not the kind of weights."""
    return counts if how == AsyncOptions() else {}
