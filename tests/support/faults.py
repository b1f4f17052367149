"""One small job on devices in memory, and somebody who dies at a failpoint.

The model has everything that could tell: running statistics, dropout, a weight in two stages, and
the job has momentum and evaluates. Where it clips, updates wait until they count; else they are
made ahead. Mostly the data holder `a` trains nothing itself, so that every stage can die; `b`, `c`,
`d` are the first plan's stages and `e` has no work at first. Where `a` itself dies it has the first
stage, and is started again in its folder.

Which faults there are: `fault_list.py`; what must not show: `fault_checks.py`. Used by the tests
and by `tools/failpoint_matrix.py`.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain import events, failpoints
from p2ptrain.coordinator import plan_cluster
from p2ptrain.events import Eval, Event, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.recovery_settings import RecoverySettings
from tests.integration.training.group_plans import Stage, divided, plan
from tests.integration.training.household import Devices, devices
from tests.support.fault_scenery import (
    SETTINGS,
    Gate,
    kept_early,
    nothing_better,
    taken_in,
)
from tests.support.memory_household import memory_id

STEPS = 8
STEP = 3
"""Updates that count when things begin to go wrong."""
BATCH, MICRO_BATCH, SAMPLES = 16, 4, 48
FEATURES, WIDTH, CLASSES = 12, 24, 5
DEVICES = 5
RUN_SECONDS = 60.0
PIPELINE: Sequence[Stage] = (divided(4), divided(4), divided(4))
ZERO_BUBBLE: Sequence[Stage] = (Stage((4,), slack=1), Stage((4,), slack=1), Stage((4,), slack=1))
GROUP: Sequence[Stage] = (divided(4), divided(2, 2))
NEW_PLACES = "ecb"
"""The stages' devices once `e` is there: only `c` has what it needs."""


class Everything(nn.Module):
    """A chain whose first weight is used again near its end."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, WIDTH)
        self.first = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2))
        self.middle = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)
        )
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.middle(self.first(self.encode(x))))
        decoded = functional.linear(x, self.encode.weight.t())
        out: Tensor = self.head(decoded)
        return out


class Plain(nn.Module):
    """The same without what a group would do differently."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, WIDTH, WIDTH, WIDTH)
        pairs = pairwise(widths)
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Recorder:
    """A data set that remembers which sample was asked for, plan by plan."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(SAMPLES, FEATURES, generator=generator).to(dtype)
        self._labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.asked: list[list[int]] = [[]]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        self.asked[-1].append(index)
        return self._inputs[index], self._labels[index]


@dataclass(frozen=True)
class Fault:
    """Who dies where.

    Attributes:
        name: the failpoint; "" = nobody dies there.
        victim: the device that dies, whichever has come to the failpoint.
        reaches: whose coming counts; None = anybody's.
        count: how often, from update STEP on.
        first: what has happened before, as update STEP counts: "cut" (the link between the
            holder and the second stage's device breaks), "join" (`e`, which was not there, comes,
            and is given the first stage), "leave" (the second stage's device hands its work over),
            the name of a device that dies, or "".
        stages: the first plan.
        coordinator: who coordinates at first.
        checkpoints: whether the job writes them.
        copies: whether copies of stages are kept after two updates, and again as somebody dies.
        kills: (update, seconds after it counts, device that dies then).
        may_miss: whether anybody comes to the failpoint is the planner's affair.
        clips: whether the job clips its gradients.
    """

    name: str
    victim: str = ""
    reaches: str | None = None
    count: int = 1
    first: str = ""
    stages: Sequence[Stage] = PIPELINE
    coordinator: str = "a"
    checkpoints: bool = False
    copies: bool = False
    kills: tuple[tuple[int, float, str], ...] = ()
    may_miss: bool = False
    clips: bool = False

    def __str__(self) -> str:
        if self.kills:
            return ", ".join(f"{n} after {s} + {t * 1e3:.0f} ms" for s, t, n in self.kills)
        first = f" after {self.first}" if self.first else ""
        first += " with copies" if self.copies else ""
        first += ", clipped" if self.clips else ""
        office = f", {self.coordinator} coordinates" if self.coordinator != "a" else ""
        return f"{self.name}#{self.count} {self.victim}{first}{office}"

    @property
    def places(self) -> str:
        """The devices of the first plan, in the order of its stages."""
        return "abcdefgh" if self.victim == "a" else "bcdefgh"

    @property
    def waits(self) -> bool:
        """Whether the last rounds wait for somebody to come to the failpoint."""
        return self.first in ("join", "leave") or self.name.startswith(("replica.", "stable."))

    @property
    def rebuilds_stage(self) -> bool:
        """Whether it is about a lost stage that is rebuilt."""
        return self.name.startswith(("rebuild.", "log."))

    @property
    def count_at_first(self) -> int:
        """Devices that are there from the start."""
        return DEVICES - 1 if self.first == "join" else DEVICES

    @property
    def is_exact(self) -> bool:
        """Whether every stage is one device: then nothing changes by a single bit."""
        return all(len(stage.shares) == 1 for stage in self.stages)


@dataclass
class Outcome:
    """What a run did."""

    events: list[Event] = field(default_factory=list)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    fired: bool = False

    @property
    def losses(self) -> list[float]:
        """Of all steps, in order."""
        return [event.loss for event in self.events if isinstance(event, Step)]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """(step, loss) of all of them."""
        return [(e.step, e.metrics["loss"]) for e in self.events if isinstance(e, Eval)]


def _job(fault: Fault) -> tuple[Job, Recorder]:
    torch.manual_seed(11)
    model = Everything() if fault.is_exact else Plain()
    dtype = torch.float32 if fault.is_exact else torch.float64
    data, evaluated = Recorder(dtype), Recorder(dtype)
    job = Job(
        model=model.to(dtype),
        data=data,
        loss=functional.cross_entropy,
        optimizer=SGD(lr=0.05, momentum=0.9),
        batch_size=BATCH,
        micro_batch=MICRO_BATCH,
        epochs=STEPS,
        clip_grad_norm=0.5 if fault.clips else None,
        eval_data=evaluated,
    )
    return job, data


class _Run:
    """One household, and what goes wrong in it."""

    def __init__(self, household: Devices, fault: Fault, folder: Path) -> None:
        self.outcome = Outcome()
        self._household = household
        self._fault = fault
        self._folder = folder
        self._job, self._data = _job(fault)
        self._holder_died = asyncio.Event()
        self._happening: list[asyncio.Task[None]] = []
        self._over = False
        self._loop = asyncio.get_running_loop()
        self.gate = Gate(3 if fault.copies else STEPS)  # nothing goes wrong before a copy is there

    def listen(self, event: Event) -> None:
        """As the job's listener."""
        if self._holder_died.is_set():
            return  # nobody hears what a dead process says
        self.outcome.events.append(event)
        if isinstance(event, events.Plan):
            self._data.asked.append([])
            if event.reason != "start":
                self.gate.open()
        if not isinstance(event, Step):
            return
        if event.step == STEP:
            self._begin()
        for step, seconds, name in self._fault.kills:
            if step == event.step:
                asyncio.get_running_loop().call_later(seconds, self._kill, name)

    def _begin(self) -> None:
        fault, mesh = self._fault, self._household.mesh
        if fault.waits:
            self.gate.close(STEPS - 2)  # it must come before the end
        if fault.name:
            device = None if fault.reaches is None else memory_id(fault.reaches)
            failpoints.arm(fault.name, self._on_reached, device=device, count=fault.count)
        match fault.first:
            case "cut":
                mesh.cut(mesh["a"], mesh["c"], "pulled")
            case "join":
                self._happen(self._join("e"))
            case "leave":
                leaver = fault.places[1]
                self._happen(self._leave(leaver), leaver)
            case _ if fault.first:
                self._kill(fault.first)

    def _happen(self, what: Coroutine[Any, Any, None], name: str | None = None) -> None:
        self._happening.append(asyncio.create_task(what, name=name))

    async def _join(self, name: str) -> None:
        await self._household.mesh.join(name)
        self._household.start(name)

    async def _leave(self, name: str) -> None:
        member = self._household.members[name]
        await member.hand_over(RUN_SECONDS)
        if name not in self.outcome.dead:
            self.outcome.left.append(name)
            await member.close()
            await self._household.mesh.leave(name)

    def _on_reached(self, reached: failpoints.Reached) -> asyncio.Future[None] | None:
        if threading.current_thread() is not threading.main_thread():
            done = threading.Event()
            self._loop.call_soon_threadsafe(lambda: (self._dies_at(reached), done.set()))
            done.wait()
            return None  # what the thread does from here on, nobody sees
        return self._dies_at(reached)

    def _dies_at(self, reached: failpoints.Reached) -> asyncio.Future[None] | None:
        self.outcome.fired = True
        self.gate.open()
        victim = self._fault.victim
        self._kill(victim)
        is_own = reached.device == memory_id(victim)
        return self._loop.create_future() if is_own else None

    def _kill(self, name: str) -> None:
        if self._over or name in self.outcome.dead or name in self.outcome.left:
            return
        if name == "a":
            for folder in ("now", "checkpoints"):
                if (self._folder / folder).exists():
                    shutil.copytree(self._folder / folder, self._folder / f"{folder} left")
            self._household.mesh.freeze(name)
            self._holder_died.set()
            return
        self.outcome.dead.append(name)
        self._household.mesh.freeze(name)  # at once nothing comes from it any more
        self._happen(self._household.mesh.kill(name))

    async def train(self) -> None:
        """To the end, and look at what the survivors still have."""
        await self._train_here()
        if self._holder_died.is_set():
            await self._household.mesh.kill("a")
            await self._household.restart("a")
            self._holder_died.clear()
            self.outcome.asked = self._data.asked[1:]
            self._job, self._data = _job(self._fault)
            await self._train_here(" left")
        self._over = True
        for task in self._happening:
            if task.get_name() in self.outcome.dead:
                task.cancel()  # a dead device's own task goes on with nothing
        await asyncio.gather(*self._happening, return_exceptions=True)
        for task in self._happening:
            if not task.cancelled():
                task.result()
        self.outcome.weights = self._job.model.state_dict()
        self.outcome.asked += self._data.asked[1:]
        for name, member in self._household.members.items():
            if name not in (*self.outcome.dead, *self.outcome.left):
                await member.service.slot.idle.wait()
                if member.service.slot.hosted is not None:
                    self.outcome.left_over.append(f"stages on {name}")

    async def _train_here(self, left: str = "") -> None:
        """One process of the device with the data, until it is done or dead.

        Args:
            left: what is added to the names of folders that the process before left.
        """
        options = TrainOptions(
            wait_for=self._fault.count_at_first,
            planner="pp",
            steps=STEPS,
            checkpoint=self._folder / f"checkpoints{left}" if self._fault.checkpoints else None,
            checkpoint_every=2,
            out=self._folder / "weights",
        )
        state = StateFolder(self._folder / f"now{left}")
        run = self._household.holder_run(self._job, options, self.listen, state)
        running = asyncio.create_task(run.run())
        dying = asyncio.create_task(self._holder_died.wait())
        try:
            await asyncio.wait([running, dying], return_when=asyncio.FIRST_COMPLETED)
            if not self._holder_died.is_set():
                await running
        finally:
            for task in (running, dying):
                task.cancel()
            await asyncio.sleep(0)
            if self._holder_died.is_set():
                running.cancel()  # who is dead writes no weights of the last step
            await asyncio.gather(running, dying, return_exceptions=True)


async def outcome_of(fault: Fault) -> Outcome:
    """Train with that fault.

    Raises:
        AssertionError: the failpoint was never reached.
        TimeoutError: nothing more came of it.
    """
    planner = "pp" if fault.is_exact else "auto"

    def forced(*question: Any) -> Plan:
        return replace(plan(fault.stages, *question, names=fault.places), planner=planner)

    before = asyncio.all_tasks()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        complaints = stack.enter_context(_complaints())
        stack.enter_context(patch.object(plan_cluster, "make_plan", forced))
        settings = SETTINGS
        if fault.copies:  # the first weights are no way back
            stack.enter_context(kept_early())
            settings = replace(settings, first_weights_replay_seconds=0.0)
        if fault.rebuilds_stage:  # for a single step; who cannot may go back to the first weights
            first = RecoverySettings().first_weights_replay_seconds
            settings = replace(settings, rebuild_min_steps=1, first_weights_replay_seconds=first)
        if fault.first == "join":
            settings = replace(settings, newcomer_settle_seconds=0.0)
            stack.enter_context(taken_in(PIPELINE, NEW_PLACES))
        count = fault.count_at_first
        async with asyncio.timeout(RUN_SECONDS), devices(count, settings=settings) as here:
            if fault.coordinator != "a":
                here.mesh.elect(fault.coordinator)
            run = _Run(here, fault, Path(folder))
            stack.enter_context(run.gate.in_place())
            try:
                await run.train()
            finally:
                failpoints.disarm()
        gc.collect()  # a future that nobody looked at says so when it goes
        left = [repr(task) for task in asyncio.all_tasks() - before]
        run.outcome.left_over += [*complaints, *left]
    assert run.outcome.fired or fault.may_miss or not fault.name, f"{fault} was never reached"
    return run.outcome


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the event loop has to say of errors that nobody took."""
    found: list[str] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        found.append(f"{context['message']}: {context.get('exception')!r}")

    loop.set_exception_handler(note)
    try:
        yield found
    finally:
        loop.set_exception_handler(before)


async def undisturbed(fault: Fault) -> Outcome:
    """The run that `fault`'s must not differ from."""
    with nothing_better():
        return await outcome_of(replace(fault, name="", first="", coordinator="a", kills=()))
