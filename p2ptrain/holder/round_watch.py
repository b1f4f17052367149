"""The last rounds of this device's job as bars, for pages that ask: `plan/round_picture.py`.

Devices record while they are asked for it (`holder/trace/span_collector.py`), and stop by
themselves half a minute after the last page. The round that the plan predicted is simulated once a
plan, in a process beside training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from time import perf_counter

from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.coordinator.plan_expectations import expected_round
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.errors import Error
from p2ptrain.holder.driver import JobDriver
from p2ptrain.holder.trace.span_collector import CollectorSettings, SpanCollector
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.plan.round_picture import DEVICES_SHOWN, PredictedRound, RoundPicture, last_rounds
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import SearchPriority, run_in_child

log = get_logger(__name__)

WATCHED = CollectorSettings(most_spans=40_000)
"""Where no trace is written: a picture needs the newest."""

ROUNDS_LOOKED_AT = 4
"""The newest is under way, and of the oldest the beginning may be missing."""


PICTURE_SECONDS = 1.0
"""A picture as old is given again."""


class RoundWatch:
    """Of one job.

    Args:
        devices: ids of those that have a part now.
        driver: drives the job; None before it is known which job this is.
    """

    def __init__(
        self,
        mesh: Mesh,
        collector: SpanCollector,
        devices: Callable[[], Collection[str]],
        driver: Callable[[], JobDriver | None],
    ) -> None:
        self._mesh = mesh
        self._collector = collector
        self._devices = devices
        self._driver = driver
        self._is_asked = asyncio.Lock()
        self._answer: tuple[float, RoundPicture] | None = None
        self._simulated: Plan | None = None  # the plan that was
        self._predicted: tuple[list[str], PredictedRound | None] = [], None  # of which devices
        self._tasks = TaskOwner(_failed)

    async def picture(self) -> RoundPicture:
        """Of now; without rounds where none was watched yet: ask again after some."""
        async with self._is_asked:
            if self._answer and perf_counter() - self._answer[0] < PICTURE_SECONDS:
                return self._answer[1]
            await self._collector.begin()
            self._simulate()
            names = sorted(display_name(self._mesh, device) for device in self._devices())
            shown = last_rounds(list(self._collector.entries(ROUNDS_LOOKED_AT)), names)
            known, predicted = self._predicted
            found = replace(shown, predicted=predicted if known == list(shown.devices) else None)
            self._answer = perf_counter(), found
            return found

    async def close(self) -> None:
        """The job is over."""
        await self._tasks.cancel()

    def _simulate(self) -> None:
        """The plan in force, if that was not done yet."""
        driver = self._driver()
        plan = None if driver is None else driver.replan_watcher.plan
        if driver is None or plan is None or plan is self._simulated:
            return
        self._simulated, self._predicted = plan, ([], None)
        if driver.question is not None:
            self._tasks.spawn(self._predict(plan, driver.question), "simulate the plan")

    async def _predict(self, plan: Plan, question: PlanQuestion) -> None:
        asked = partial(expected_round, question.request, question.household, plan)
        try:
            found = await run_in_child(lambda run: run(asked), SearchPriority.PROMPT)
        except Error as error:
            log.info("round_not_predicted", why=str(error))
            return
        if self._simulated is plan:
            self._predicted = sorted(plan.device_names)[:DEVICES_SHOWN], found


def _failed(name: str, error: BaseException) -> None:
    log.warning("round_not_predicted", task=name, why=str(error) or type(error).__name__)
