"""Gathers what is known of the job that this device holds, for those who ask.

`p2ptrain explain`: it watches some rounds as a trace does, and asks the planner what other
households would give, in a process beside training. What is known is written down when the job
ends.

Pages: the last rounds as bars, `plan/round_picture.py`. Devices record while they are asked for it
(`holder/trace/span_collector.py`), and stop by themselves half a minute after the last page. The
round that the plan predicted is simulated once a plan, in a process beside training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

from p2ptrain import events
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.coordinator.plan_expectations import expected_round
from p2ptrain.coordinator.plan_question import PlanQuestion, other_households
from p2ptrain.coordinator.service import search
from p2ptrain.errors import Error, PeerError, UserError
from p2ptrain.events import Event
from p2ptrain.holder.driver import JobDriver
from p2ptrain.holder.energy_counter import EnergyCounter
from p2ptrain.holder.trace.span_collector import CollectorSettings, SpanCollector
from p2ptrain.job.last_job import keep_facts
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import MemberState, Mesh, display_name
from p2ptrain.messages.kinds import EXPLAIN, ROUND_PICTURE
from p2ptrain.net.message import Message
from p2ptrain.plan.explain import TimeUse, time_use
from p2ptrain.plan.round_picture import DEVICES_SHOWN, PredictedRound, RoundPicture, last_rounds
from p2ptrain.plan.types.job_facts import (
    DeviceFacts,
    IdleDevice,
    JobFacts,
    LinkFacts,
    WhatIf,
)
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import SearchPriority, run_in_child
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.profile_corrections import ExpectedSeconds

log = get_logger(__name__)

WATCHED = CollectorSettings(most_spans=40_000)
"""Where no trace is written: a picture needs the newest."""

ROUNDS_LOOKED_AT = 4
"""The newest is under way, and of the oldest the beginning may be missing."""

PICTURE_SECONDS = 1.0
"""A picture as old is given again."""

ROUNDS_WATCHED = 3

MIN_WATCH_SECONDS, MAX_WATCH_SECONDS = 0.5, 8.0
"""For them."""

PLAN_SECONDS = 25.0
"""For all questions to the planner."""

MOST_WITHOUT = 4
"""Devices of which it is asked what would be without them."""

FRESH_SECONDS = 3.0
"""An answer as old is given again."""

_NEW = "it has come since the plan was made"

_NOTHING = TimeUse({}, {})


class FactGatherer:
    """Of one job. `note` its events, `open` it as soon as the job is known, and `close` it.

    Args:
        devices: ids of those that have a part now.
        driver: drives the job; None before it is known which job this is.
        warn: warns the user.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: str,
        collector: SpanCollector,
        energy: EnergyCounter,
        devices: Callable[[], Collection[str]],
        driver: Callable[[], JobDriver | None],
        warn: Callable[[str], None],
    ) -> None:
        self._mesh = mesh
        self._model = model
        self._collector = collector
        self._energy = energy
        self._trained_on = devices
        self._driver = driver
        self._warn = warn
        self._plan: events.Plan | None = None
        self._step = 0
        self._is_asked = asyncio.Lock()
        self._answer: tuple[float, JobFacts] | None = None
        self._is_shown = asyncio.Lock()
        self._picture: tuple[float, RoundPicture] | None = None
        self._simulated: Plan | None = None  # the plan that was
        self._predicted: tuple[list[str], PredictedRound | None] = [], None  # of which devices
        self._tasks = TaskOwner(_failed)

    def _question(self) -> PlanQuestion | None:
        """What the plan in force was asked with; None where it was given."""
        driver = self._driver()
        return None if driver is None else driver.question

    def note(self, event: Event) -> None:
        """What has happened."""
        if isinstance(event, events.Plan):
            self._plan, self._answer = event, None
        elif isinstance(event, events.Step):
            self._step = event.step

    def open(self) -> None:
        """From now on members may ask."""
        self._mesh.route(EXPLAIN, self._explain)
        self._mesh.route(ROUND_PICTURE, self._show_rounds)

    async def _explain(self, _peer: str, _message: Message) -> Message:
        facts = await self.facts()
        if facts is None:
            raise PeerError(f"{self._mesh.name} has no plan for its training yet")
        return Message(EXPLAIN, {}, (facts.to_part(),))

    async def _show_rounds(self, _peer: str, _message: Message) -> Message:
        return Message(ROUND_PICTURE, {}, ((await self.picture()).to_part(),))

    async def facts(self) -> JobFacts | None:
        """After some rounds and questions to the planner; None before the first plan."""
        async with self._is_asked:
            now = perf_counter()
            if self._answer and now - self._answer[0] < FRESH_SECONDS:
                return self._answer[1]
            if self.known() is None:
                return None
            await self._energy.fetch()
            known = self.known()
            assert known is not None
            use, rounds = await self._watched(known.round_seconds)
            known = self._with_use(self.known() or known, use, rounds)
            what_ifs, unasked = await self._asked(known)
            found = replace(known, what_ifs=what_ifs, unasked=unasked)
            self._answer = perf_counter(), found
            return found

    def known(self, *, is_over: bool = False) -> JobFacts | None:
        """What is known without waiting; None before the first plan."""
        plan, driver = self._plan, self._driver()
        if plan is None:
            return None
        recent = [] if driver is None else list(driver.replan_watcher.recent)
        seconds = median(one for one, _ in recent) if recent else None
        predicted = plan.predicted_samples_per_s
        return JobFacts(
            model=self._model,
            holder=self._mesh.name,
            is_over=is_over,
            step=self._step,
            samples_per_s=self._samples(plan) / seconds if seconds else None,
            predicted_samples_per_s=predicted,
            round_seconds=seconds,
            watched_rounds=0,
            devices=self._devices(recent, {} if driver is None else driver.replan_watcher.promised),
            idle=self._idle(plan),
            energy=self._energy.use,
            trained_samples=self._energy.samples,
        )

    def _samples(self, plan: events.Plan) -> int:
        question = self._question()
        if question is not None:
            return question.request.batch_size
        return plan.micro_batch * plan.micro_batches

    def _devices(
        self,
        recent: Sequence[tuple[float, Mapping[Seat, CpuSpan]]],
        promised: Mapping[Seat, ExpectedSeconds],
    ) -> tuple[DeviceFacts, ...]:
        seats = recent[-1][1].keys() if recent else promised.keys()
        stages: dict[str, list[int]] = {}
        for stage, device in sorted(seats):
            stages.setdefault(device, []).append(stage)
        found = []
        for device, numbers in stages.items():
            own = [(stage, device) for stage in numbers]
            busy = sum(
                median(spans[seat].wall for _, spans in recent if seat in spans)
                for seat in own
                if recent
            )
            expected = None
            if all(seat in promised for seat in own):
                expected = sum(promised[seat].wall for seat in own)
            name = display_name(self._mesh, device)
            found.append(DeviceFacts(name, tuple(numbers), float(busy), expected))
        return tuple(found)

    def _idle(self, plan: events.Plan) -> tuple[IdleDevice, ...]:
        found = [IdleDevice(out.name, out.reason[:500]) for out in plan.left_out]
        known = {one.name for one in found}
        known |= {device.name for stage in plan.stages for device in stage.devices}
        found += [
            IdleDevice(member.name, member.sentence if member.rests else _NEW)
            for member in self._mesh.members.values()
            if member.state is MemberState.ALIVE and member.name not in known
        ]
        return tuple(found)

    # -- for pages -------------------------------------------------------------------------------

    async def picture(self) -> RoundPicture:
        """Of now; without rounds where none was watched yet: ask again after some."""
        async with self._is_shown:
            if self._picture and perf_counter() - self._picture[0] < PICTURE_SECONDS:
                return self._picture[1]
            await self._collector.begin()
            self._simulate()
            names = sorted(display_name(self._mesh, device) for device in self._trained_on())
            shown = last_rounds(list(self._collector.entries(ROUNDS_LOOKED_AT)), names)
            known, predicted = self._predicted
            found = replace(shown, predicted=predicted if known == list(shown.devices) else None)
            self._picture = perf_counter(), found
            return found

    async def close(self, folder: StateFolder | None) -> None:
        """The job is over: what is known goes into `folder`, for `p2ptrain explain` afterwards."""
        self._mesh.unroute(EXPLAIN)
        self._mesh.unroute(ROUND_PICTURE)
        await self._tasks.cancel()
        facts = self.known(is_over=True)
        if facts is not None and folder is not None:
            try:
                keep_facts(folder, facts)
            except UserError as error:
                self._warn(f"what limited this training is not written down: {error}")

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

    # -- watching --------------------------------------------------------------------------------

    async def _watched(self, round_seconds: float | None) -> tuple[TimeUse, int]:
        """What some rounds were spent on, and how many they were."""
        if round_seconds is None:
            return _NOTHING, 0
        wanted = ROUNDS_WATCHED * round_seconds
        await self._collector.begin()
        began, first = perf_counter(), self._step
        await asyncio.sleep(min(max(wanted, MIN_WATCH_SECONDS), MAX_WATCH_SECONDS))
        await self._collector.fetch()
        rounds = (perf_counter() - began) / round_seconds
        if self._step == first or rounds <= 0:
            return _NOTHING, 0
        entries = (e for e in self._collector.entries() if e.start_seconds >= began)
        use = time_use(entries)
        waits = {
            device: {what: seconds / rounds for what, seconds in of.items()}
            for device, of in use.waits.items()
        }
        links = {ends: seconds / rounds for ends, seconds in use.links.items()}
        return TimeUse(waits, links), self._step - first

    def _with_use(self, known: JobFacts, use: TimeUse, rounds: int) -> JobFacts:
        question = self._question()
        rates = {} if question is None else question.household.links
        links = []
        for (sender, receiver), seconds in sorted(use.links.items()):
            rate = rates.get((sender, receiver))
            links.append(
                LinkFacts(sender, receiver, seconds, None if rate is None else rate.bytes_per_s)
            )
        devices = [
            replace(device, waits=use.waits.get(device.name, {})) for device in known.devices
        ]
        return replace(known, devices=tuple(devices), links=tuple(links), watched_rounds=rounds)

    # -- asking the planner ----------------------------------------------------------------------

    async def _asked(self, known: JobFacts) -> tuple[tuple[WhatIf, ...], str]:
        question = self._question()
        if question is None:
            return (), "the plan in force was not made by it"
        found = [WhatIf("now", "", known.predicted_samples_per_s)]
        used = [device.name for device in known.devices]
        changes = other_households(question, used, MOST_WITHOUT)
        with suppress(TimeoutError):
            async with asyncio.timeout(PLAN_SECONDS):
                for what, changed in changes:
                    found.append(await _predicted(what, changed))
        return tuple(found), ""


async def _predicted(what: WhatIf, question: PlanQuestion) -> WhatIf:
    try:
        plan = await search(question, SearchPriority.PROMPT)
    except Error as error:
        return replace(what, reason=str(error)[:500])
    (name,) = plan.device_names if what.change == "alone" else (what.name,)
    return replace(what, name=name, samples_per_s=plan.predicted.samples_per_s)


def _failed(name: str, error: BaseException) -> None:
    log.warning("round_not_predicted", task=name, why=str(error) or type(error).__name__)
