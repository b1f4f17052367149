"""Asynchronous jobs in which devices die and leave at random moments, held against the formula.

A seed says how many devices there are, which weights mini-batches see, how often versions are kept,
who dies when (one after the other, or two at once where copies allow it), and whether somebody
leaves. Every step must be reported once, in order, losses and weights must be, to the bit, those
of plain torch with the same delays and cuts (`tests/support/delayed_reference.py`). A job may also
end because what only dead devices had is lost; it must say so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from p2ptrain.errors import DeviceLost
from p2ptrain.events import Event, Step
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.asynchrony import PLANNER, AsyncOptions, FtpipehdOptions
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.recovery.recovery_settings import RecoverySettings
from tests.integration.training.delayed import Generations, delayed_job, options
from tests.integration.training.household import Devices, devices
from tests.integration.training.test_recovery_elastic import leave
from tests.support.thorough import examples_of

RUN_SECONDS = 60.0
FTPIPEHD_SHARE = 0.3
"""Of seeds: cut anew by capacities meanwhile."""
HOW = (
    AsyncOptions(),
    AsyncOptions(),
    AsyncOptions(aggregate=1),
    AsyncOptions(Weights.VERTICAL),
    AsyncOptions(Weights.VERTICAL, 2),
    AsyncOptions(Weights.UNSTASHED),
)


@dataclass(frozen=True)
class Course:
    """What one seed says.

    Attributes:
        every: updates between kept versions.
        deaths: (step, seconds after people heard of it, device).
        leaves: (step, device), if anybody leaves.
    """

    seed: int
    model: str
    count: int
    how: AsyncOptions
    planner: str
    recovery: ReplanMethod
    steps: int
    every: int
    deaths: tuple[tuple[int, float, str], ...]
    leaves: tuple[int, str] | None

    @staticmethod
    def of(seed: int) -> Course:
        """The same one each time."""
        chance = random.Random(seed)
        count = chance.choice((2, 3, 3, 4))
        others = list("bcd"[: count - 1])
        chance.shuffle(others)
        steps = chance.randrange(20, 60)
        dying = others[: chance.randrange(len(others) + 1)]
        deaths = tuple((chance.randrange(4, steps - 2), 0.02 * chance.random(), n) for n in dying)
        left = others[len(dying) :]
        leaves = (
            (chance.randrange(3, steps - 2), left[0]) if left and chance.random() < 0.3 else None
        )
        course = Course(
            seed,
            chance.choice(("mlp", "mlp", "cnn")),
            count,
            chance.choice(HOW),
            chance.choice(("pp", "pp", "auto", "dp")),
            chance.choice(
                (ReplanMethod.LIGHT, ReplanMethod.LIGHT, ReplanMethod.HEAVY, ReplanMethod.RESPIPE)
            ),
            steps,
            chance.randrange(2, 8),
            deaths,
            leaves,
        )
        return replace(course, planner=PLANNER) if chance.random() < FTPIPEHD_SHARE else course

    @property
    def ftpipehd(self) -> FtpipehdOptions:
        """Looks at the cuts come often, and whole copies at each second copy."""
        return FtpipehdOptions(2 + self.every, 3 * self.every, self.every, 2 * self.every)

    @property
    def shares(self) -> bool:
        """Whether `dp` may plan so: else `pp` does."""
        return self.how == AsyncOptions() and self.model == "mlp"


SETTINGS = RecoverySettings(first_weights_replay_seconds=540.0)


class Run:
    """One household, and what goes wrong in it."""

    def __init__(self, household: Devices, course: Course) -> None:
        self.generations = Generations(household)
        self._household, self._course = household, course
        self._happening: list[asyncio.Task[None]] = []

    def listen(self, event: Event) -> None:
        """As the job's listener."""
        self._household.events.append(event)
        if not isinstance(event, Step):
            return
        for step, seconds, name in self._course.deaths:
            if step == event.step:
                self._happening.append(asyncio.create_task(self._kill(name, seconds)))
        if self._course.leaves is not None and self._course.leaves[0] == event.step:
            name = self._course.leaves[1]
            self._happening.append(asyncio.create_task(leave(self._household, name)))

    async def _kill(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._household.mesh.freeze(name)
        await self._household.mesh.kill(name)

    async def over(self) -> None:
        """Wait for what was begun; a job may end before."""
        for task in self._happening:
            if self._course.leaves is not None:
                task.cancel()
        await asyncio.gather(*self._happening, return_exceptions=True)


@contextmanager
def _kept(course: Course) -> Iterator[None]:
    wants = partial(_wants, course.every)
    with ExitStack() as stack:
        stack.enter_context(patch.object(SnapshotManager, "wants", lambda _, step: wants(step)))
        yield


def _wants(every: int, step: int) -> bool:
    return step % every == 0


async def run(course: Course) -> str:
    """Run it; returns what came of it. Raises AssertionError: something shows."""
    job = delayed_job(course.model)
    planner = "pp" if course.planner == "dp" and not course.shares else course.planner
    chosen = options(
        course.count,
        course.how,
        course.steps,
        planner=planner,
        recovery=course.recovery,
        ftpipehd=course.ftpipehd,
    )
    async with asyncio.timeout(RUN_SECONDS), devices(course.count, settings=SETTINGS) as household:
        going = Run(household, course)
        try:
            with _kept(course), going.generations.watched():
                await household.holder_run(job, chosen, going.listen).run()
        except DeviceLost as error:
            return f"lost: {error}"
        finally:
            await going.over()
        make = partial(delayed_job, course.model)
        going.generations.assert_by_formula(job, make, course.how, course.steps)
        return f"{len(going.generations.begun)} plans"


SEEDS = range(examples_of(4))


@pytest.mark.parametrize("course", [Course.of(seed) for seed in SEEDS], ids=lambda c: str(c.seed))
async def test_every_step_is_reported_once_with_the_formulas_loss(course: Course) -> None:
    torch.set_num_threads(1)
    await run(course)
