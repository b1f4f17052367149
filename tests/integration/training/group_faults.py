"""Jobs with groups in which devices die, come back, leave and lose links, held against plain torch.

A seed says the model, the optimizer, how stages divide or deal their work, and what happens when:
kills (the device comes back or not), frozen devices, broken and pulled links, farewells, newcomers,
elections, and the death of the device with the data, which is started again. Whenever a plan is
made or looked for, it is another random one of groups and single devices, so that weights move
between all kinds of stages. Each step must be reported once, in order, with the loss of plain torch
in float64 within 1e-8, and so must the weights be at the end. A job may also end because what only
dead devices had is lost; it must say so. The device with the data dies only where others train too:
nobody else would have the weights.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from p2ptrain import events
from p2ptrain.coordinator import plan_cluster, replan_decision
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, planner_question
from p2ptrain.errors import DeviceLost, PeerError, UserError
from p2ptrain.events import Event, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import ReplanMethod, TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import (
    SGD,
    Adam,
    AdamW,
)
from p2ptrain.plan.replan.hysteresis import ReplanAction, ReplanDecision
from p2ptrain.plan.replan.migration import plan_migration
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.process import child_process
from p2ptrain.recovery.recovery_settings import RecoverySettings
from tests.integration.training.group_plans import Stage, dealt, divided, plan
from tests.integration.training.household import Devices, devices
from tests.integration.training.test_recovery_elastic import leave
from tests.support import zoo
from tests.support.curves import by_plain_torch, difference
from tests.support.memory_household import memory_id
from tests.support.reference import Outcome
from tests.support.twin_device import TwinDevice

RUN_SECONDS = 150.0
TOLERANCE = 1e-8
BATCH, MICRO_BATCH = 16, 4
NORMALISED = "cnn"
"""Of the zoo: running statistics, so that its micro-batches must stay whole."""
MODELS = ("mlp", "residual", NORMALISED, NORMALISED, "gpt")
OPTIMIZERS: Sequence[OptimizerSpec] = (
    SGD(lr=0.05, momentum=0.9),
    Adam(lr=0.005),
    AdamW(lr=0.005, weight_decay=0.1),
)


class Kind(StrEnum):
    """What happens to a device."""

    KILL = "kill"
    """Its process dies, and another one of the same device comes after a while."""
    LOSE = "lose"
    """It dies for good."""
    FREEZE = "freeze"
    """It stands still for a while, and nobody takes it for dead."""
    SILENT = "silent"
    """It stands still, and the others take it for dead until it is heard of again."""
    CUT = "cut"
    """A link of its breaks; there is another one at once."""
    PULL = "pull"
    """A link of its breaks, and there is none for a while."""
    LEAVE = "leave"
    """It says good-bye."""
    RETURN = "return"
    """It says good-bye, and comes again after a while."""
    JOIN = "join"
    """It was not there before."""
    FLICKER = "flicker"
    """It was not there before; it comes and dies, several times."""
    ELECT = "elect"
    """It coordinates from now on."""


OF_LINKS = frozenset({Kind.CUT, Kind.PULL})
LASTING = frozenset({Kind.LOSE, Kind.LEAVE, Kind.JOIN, Kind.FLICKER})
"""After which a device is left alone."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One.

    Attributes:
        step, after: when: so many seconds after people heard of that step.
        seconds: how long it lasts.
        other: at the other end of the link.
    """

    step: int
    after: float
    kind: Kind
    device: str
    seconds: float = 0.0
    other: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.device}{self.other}@{self.step}+{self.seconds:.2f}s"


@dataclass(frozen=True)
class Course:
    """What one seed says.

    Attributes:
        count: devices at the start, the one with the data included.
        holder_dies: at these steps; it is started again.
        moves: how likely a look for a better plan finds one.
    """

    seed: int
    model: str
    optimizer: OptimizerSpec
    clips: bool
    recovery: ReplanMethod
    count: int
    steps: int
    happenings: tuple[Happening, ...]
    holder_dies: tuple[int, ...]
    moves: float

    @staticmethod
    def of(seed: int) -> Course:
        """The same one each time."""
        chance = random.Random(seed)
        count = chance.randrange(2, 6)
        steps = chance.randrange(20, 60)
        model = chance.choice(MODELS)
        return Course(
            seed,
            model,
            chance.choice(OPTIMIZERS),
            chance.random() < 0.3,
            chance.choice(
                (ReplanMethod.LIGHT, ReplanMethod.LIGHT, ReplanMethod.HEAVY, ReplanMethod.RESPIPE)
            ),
            count,
            steps,
            tuple(_happenings(chance, count, steps)),
            tuple(sorted(chance.sample(range(3, steps - 2), chance.choice((0, 0, 0, 1, 2))))),
            chance.choice((0.0, 0.5, 1.0)),
        )

    def __str__(self) -> str:
        what = ", ".join(map(str, self.happenings))
        extras = [self.optimizer.name, "clips" * self.clips, self.recovery.value]
        extras += [f"a dies at {self.holder_dies}"] if self.holder_dies else []
        return f"{self.model} {' '.join(filter(None, extras))} {self.count} devices: {what}"


def _happenings(chance: random.Random, count: int, steps: int) -> Iterator[Happening]:
    here, new = "bcdefgh"[: count - 1], list("hgfedcb"[: 8 - count])
    free = dict.fromkeys(here, 0)  # device -> first step at which something may happen to it
    step = 0
    for _ in range(chance.randrange(1, 7)):
        step += chance.choice((0, 1, 3, 8))
        kind = chance.choice(list(Kind))
        if kind in (Kind.JOIN, Kind.FLICKER):
            device = new.pop()
        else:
            well = [device for device, since in free.items() if since <= step]
            if not well:
                continue
            device = chance.choice(well)
            free[device] = steps if kind in LASTING else step + 6
        if 2 + step >= steps - 2:
            return
        others = [each for each in "a" + here if each != device]
        other = chance.choice(others) if kind in OF_LINKS else ""
        after, seconds = 0.03 * chance.random(), chance.uniform(0.0, 1.0)
        yield Happening(2 + step, after, kind, device, seconds, other)


class Run:
    """One household, and what goes wrong in it."""

    def __init__(self, household: Devices, course: Course, folder: Path) -> None:
        self._household, self._course, self._folder = household, course, folder
        self._left = list(course.happenings)
        self._deaths = list(course.holder_dies)
        self._dying = asyncio.Event()
        self._happening: list[asyncio.Task[None]] = []
        self.job = make_job(course)

    async def train(self) -> None:
        """To the end, through all deaths of the device with the data."""
        while not await self._train_here():
            await self._household.mesh.kill("a")
            await self._household.restart("a", StateFolder(self._folder / "now"))
            self._dying.clear()
            self.job = make_job(self._course)

    async def _train_here(self) -> bool:
        """One process of the device with the data; whether it came to the end."""
        options = TrainOptions(
            wait_for=self._course.count, steps=self._course.steps, recovery=self._course.recovery
        )
        state = StateFolder(self._folder / "now")
        run = self._household.holder_run(self.job, options, self._listen, state)
        running = asyncio.create_task(run.run())
        dying = asyncio.create_task(self._dying.wait())
        try:
            await asyncio.wait([running, dying], return_when=asyncio.FIRST_COMPLETED)
            if self._dying.is_set():
                # what its process does in its last moments reaches neither others nor the disk
                kept = self._folder / "now"
                kept.rename(self._folder / "kept")
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                _replace(kept, self._folder / "kept")
                return False
            await running
            return True
        finally:
            for task in (running, dying):
                task.cancel()
            await asyncio.gather(running, dying, return_exceptions=True)

    def _listen(self, event: Event) -> None:
        if self._dying.is_set():
            return
        self._household.events.append(event)
        if not isinstance(event, Step):
            return
        due = [what for what in self._left if what.step <= event.step]
        self._left = [what for what in self._left if what.step > event.step]
        for what in due:
            self._happening.append(asyncio.create_task(self._befall(what)))
        if self._deaths and self._deaths[0] <= event.step and self._is_shared():
            self._deaths.pop(0)
            self._household.mesh.freeze("a")
            self._dying.set()

    def _is_shared(self) -> bool:
        """Whether others have a part in the newest plan, and live."""
        household = self._household
        newest = [event for event in household.events if isinstance(event, events.Plan)][-1]
        names = {device.name for stage in newest.stages for device in stage.devices}
        return any(household.mesh.running(memory_id(name)) for name in names - {"a"})

    async def _befall(self, what: Happening) -> None:
        household, mesh = self._household, self._household.mesh
        name = what.device
        await asyncio.sleep(what.after)
        match what.kind:
            case Kind.KILL | Kind.LOSE:
                mesh.freeze(name)
                await mesh.kill(name)
                if what.kind is Kind.KILL:
                    await asyncio.sleep(what.seconds)
                    await household.restart(name)
            case Kind.FREEZE:
                mesh.freeze(name)
                await asyncio.sleep(what.seconds)
                await mesh.thaw(name)
            case Kind.SILENT:
                mesh.freeze(name)
                mesh.declare_dead(name)
                await asyncio.sleep(what.seconds)
                await mesh.thaw(name)
            case Kind.CUT:
                mesh.cut(mesh[name], mesh[what.other], "pulled")
            case Kind.PULL:
                mesh.cut_link(name, what.other)
                await asyncio.sleep(what.seconds)
                mesh.heal_link(name, what.other)
            case Kind.LEAVE:
                await leave(household, name)
            case Kind.RETURN:
                await leave(household, name)
                await asyncio.sleep(what.seconds)
                await mesh.join(name)
                household.start(name)
            case Kind.JOIN:
                await mesh.join(name)
                household.start(name)
            case Kind.FLICKER:
                await self._flicker(name, what.seconds)
            case Kind.ELECT:
                mesh.elect(name)

    async def _flicker(self, name: str, seconds: float) -> None:
        for _ in range(4):
            await self._household.mesh.join(name)
            self._household.start(name)
            await asyncio.sleep(seconds / 4)
            self._household.mesh.freeze(name)
            await self._household.mesh.kill(name)
            await self._household.members[name].close()

    async def over(self) -> None:
        """What was begun ends with the job."""
        for task in self._happening:
            task.cancel()
        for told in await asyncio.gather(*self._happening, return_exceptions=True):
            if isinstance(told, Exception):
                raise told


def _replace(folder: Path, by: Path) -> None:
    if folder.exists():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    by.rename(folder)


def make_job(course: Course) -> Job:
    """Its model with its first weights."""
    made = zoo.make(course.model, dtype=torch.float64)
    return Job(
        model=made.model,
        data=made.data,
        loss=made.loss,
        optimizer=course.optimizer,
        batch_size=BATCH,
        micro_batch=MICRO_BATCH,
        epochs=1000,
        clip_grad_norm=0.5 if course.clips else None,
    )


class AnyPlans:
    """Random plans of groups and single devices, one after the other."""

    def __init__(self, course: Course) -> None:
        self._chance = random.Random(course.seed + 1)
        self._course = course

    def make(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        """In place of `make_plan`."""
        chance = self._chance
        names = [device.name for device in cluster.devices]
        chance.shuffle(names)
        names = names[: chance.randrange(max(1, len(names) - 1), len(names) + 1)]
        units, left = len(profile.units), len(names)
        stages: list[Stage] = []
        while left and len(stages) < units:
            size = chance.randrange(1, min(left, MICRO_BATCH) + 1)
            stages.append(self._stage(size))
            left -= size
        used = sum(len(stage.shares) for stage in stages)
        made = plan(stages, profile, cluster, request, names=names[:used])
        return replace(made, planner="auto")

    def _stage(self, size: int) -> Stage:
        chance = self._chance
        borders = sorted(chance.sample(range(1, MICRO_BATCH), size - 1))
        edges = [0, *borders, MICRO_BATCH]
        shares = [last - first for first, last in pairwise(edges)]
        whole = self._course.model == NORMALISED or chance.random() < 0.5
        made = dealt(*shares) if whole and size > 1 else divided(*shares)
        return replace(made, slack=chance.choice((None, 0, 1)), turns=chance.random() < 0.7)

    def decide(
        self,
        request: JobPlanRequest,
        household: MeasuredCluster,
        present: replan_decision.PresentPlan,
        *_: Any,
        **_rest: Any,
    ) -> ReplanDecision:
        """In place of `hysteresis.decide`."""
        profile, cluster = planner_question(request, household)
        held = place_replicas(present.plan, chain=False)
        if self._chance.random() >= self._course.moves:
            nothing = plan_migration(profile, cluster, present.plan, held, present.plan)
            return ReplanDecision(ReplanAction.STAY, present.plan, nothing, 0.0, "it is said so")
        size = PlanRequest(request.batch_size, micro_batch=request.micro_batch)
        better = replace(self.make(profile, cluster, size), planner=present.plan.planner)
        if self._course.clips or better.device_names == {"a"}:  # updates wait
            stages = tuple(replace(stage, turn=None) for stage in better.stages)
        else:
            stages = tuple(replace(stage, goes_ahead=True) for stage in better.stages)
        better = replace(better, stages=stages)
        moved = plan_migration(profile, cluster, present.plan, held, better)
        return ReplanDecision(ReplanAction.MOVE, better, moved, None, "it is said so")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Who plans gets them."""
        with (
            patch.object(plan_cluster, "make_plan", self.make),
            patch.object(replan_decision, "decide_replan", self.decide),
            patch.object(
                child_process, "_can_be_had", lambda: False
            ),  # another process has no patches
        ):
            yield


SETTINGS = RecoverySettings(newcomer_settle_seconds=0.0)


async def run(course: Course, twins: str = "") -> str:
    """Run it; returns what came of it. Raises AssertionError: something shows.

    `twins`: devices that compute on accelerators, whatever these round.
    """
    compute = {name: TwinDevice(seed=course.seed) for name in twins}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(AnyPlans(course).in_place())
        async with (
            asyncio.timeout(RUN_SECONDS),
            devices(course.count, settings=SETTINGS, compute=compute) as household,
        ):
            going = Run(household, course, folder)
            try:
                await going.train()
            except DeviceLost as error:
                return f"lost: {error}"
            except (PeerError, UserError, asyncio.CancelledError) as error:
                raise AssertionError(f"{error!r} after {_last(household)}") from error
            finally:
                await going.over()
            _check(household, going.job, course)
            for twin in compute.values():
                twin.assert_well_used()
            plans = [event for event in household.events if isinstance(event, events.Plan)]
            reasons = [event.reason for event in plans]
            told = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
            return " ".join(f"{count} {reason}" for reason, count in told.items())


def _last(household: Devices) -> str:
    """What people heard last."""
    steps = [event.step for event in household.events if isinstance(event, Step)]
    others = [event for event in household.events if not isinstance(event, Step)]
    return f"step {steps[-1] if steps else 0}, {others[-3:]}"


def _check(household: Devices, job: Job, course: Course) -> None:
    numbers = [event.step for event in household.events if isinstance(event, Step)]
    wanted = by_plain_torch(make_job(course), course.steps)
    every = list(range(1, course.steps + 1))
    if course.holder_dies:
        missing = sorted(set(every) - set(numbers))
        assert len(missing) <= len(course.holder_dies), f"never told: {missing}"
        every = [step for step in every if step not in missing]
    assert numbers == every, f"steps {numbers}"
    kept = [wanted.losses[step - 1] for step in numbers]
    found = difference(
        Outcome(household.losses, {k: v.detach() for k, v in job.model.state_dict().items()}),
        Outcome(kept, wanted.state_dict),
    )
    assert found.loss < TOLERANCE, f"losses differ by {found.loss:.1e}"
    assert found.state < TOLERANCE, f"weights differ by {found.state:.1e}"
