"""One small job on devices in memory, somebody who dies at a failpoint, and what must not show.

The model has everything that could tell: running statistics, dropout, a weight in two stages, and
the job clips, has momentum and evaluates. Mostly the data holder `a` trains nothing itself, so that
every stage can die; `b`, `c`, `d` are the first plan's stages and `e` has no work at first. Where
`a` itself dies it has the first stage, and is started again in its folder.

Used by the tests and by `tools/failpoint_matrix.py`.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain import failpoints
from p2ptrain.mesh.memory import memory_id
from p2ptrain.mesh.state_folder import StateFolder
from p2ptrain.observe.events import Eval, Event, Failure, PlanEvent, Step
from p2ptrain.plan.plan import Plan
from p2ptrain.training import household_plan
from p2ptrain.training.job import SGD, Job
from p2ptrain.training.options import TrainOptions
from p2ptrain.training.profiling import ProfileCache
from tests.integration.training.group_plans import Stage, divided, plan
from tests.integration.training.household import Devices, devices

STEPS = 8
STEP = 3
"""Updates that count when things begin to go wrong."""
BATCH, MICRO_BATCH, SAMPLES = 16, 4, 48
FEATURES, WIDTH, CLASSES = 12, 24, 5
DEVICES = 5
RUN_SECONDS = 60.0
LOSS_TOLERANCE = 1e-8
"""Of float64, where a group adds in another order than the devices that take over."""

PIPELINE: Sequence[Stage] = (divided(4), divided(4), divided(4))
ZERO_BUBBLE: Sequence[Stage] = (Stage((4,), slack=1), Stage((4,), slack=1), Stage((4,), slack=1))
GROUP: Sequence[Stage] = (divided(4), divided(2, 2))


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
        victim: the device that dies, whoever has come to the failpoint.
        reaches: whose coming counts; None = anybody's.
        count: how often, from update STEP on.
        first: what has happened before, as update STEP counts: "cut" (the link between the
            holder and the second stage's device breaks), the name of a device that dies, or "".
        stages: the first plan.
        coordinator: who coordinates at first.
        checkpoints: whether the job writes them.
        kills: (update, seconds after it counts, device that dies then).
        may_miss: whether anybody comes to the failpoint is the planner's affair.
    """

    name: str
    victim: str = ""
    reaches: str | None = None
    count: int = 1
    first: str = ""
    stages: Sequence[Stage] = PIPELINE
    coordinator: str = "a"
    checkpoints: bool = False
    kills: tuple[tuple[int, float, str], ...] = ()
    may_miss: bool = False

    def __str__(self) -> str:
        if self.kills:
            return ", ".join(f"{n} after {s} + {t * 1e3:.0f} ms" for s, t, n in self.kills)
        first = f" after {self.first}" if self.first else ""
        office = f", {self.coordinator} coordinates" if self.coordinator != "a" else ""
        return f"{self.name}#{self.count} {self.victim}{first}{office}"

    @property
    def places(self) -> str:
        """The devices of the first plan, in the order of its stages."""
        return "abcdefgh" if self.victim == "a" else "bcdefgh"

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


_PROFILES = ProfileCache(None)  # one machine: measured once for all runs


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
        clip_grad_norm=0.5,
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
        self._ends: list[asyncio.Task[None]] = []
        self._over = False

    def listen(self, event: Event) -> None:
        """As the job's listener."""
        if self._holder_died.is_set():
            return  # nobody hears what a dead process says
        self.outcome.events.append(event)
        if isinstance(event, PlanEvent):
            self._data.asked.append([])
        if not isinstance(event, Step):
            return
        if event.step == STEP:
            self._begin()
        for step, seconds, name in self._fault.kills:
            if step == event.step:
                asyncio.get_running_loop().call_later(seconds, self._kill, name)

    def _begin(self) -> None:
        fault, mesh = self._fault, self._household.mesh
        if fault.name:
            device = None if fault.reaches is None else memory_id(fault.reaches)
            failpoints.arm(fault.name, self._on_reached, device=device, count=fault.count)
        if fault.first == "cut":
            mesh.cut(mesh["a"], mesh["c"], "pulled")
        elif fault.first:
            self._kill(fault.first)

    def _on_reached(self, reached: failpoints.Reached) -> asyncio.Future[None] | None:
        self.outcome.fired = True
        victim = self._fault.victim
        self._kill(victim)
        is_own = reached.device == memory_id(victim)
        return asyncio.get_running_loop().create_future() if is_own else None

    def _kill(self, name: str) -> None:
        if self._over or name in self.outcome.dead:
            return
        if name == "a":
            shutil.copytree(self._folder / "now", self._folder / "left")
            self._household.mesh.freeze(name)
            self._holder_died.set()
            return
        self.outcome.dead.append(name)
        self._household.mesh.freeze(name)  # at once nothing comes from it any more
        self._ends.append(asyncio.create_task(self._household.mesh.kill(name)))

    async def train(self) -> None:
        """To the end, and look at what the survivors still have."""
        await self._train_here("now")
        if self._holder_died.is_set():
            await self._household.mesh.kill("a")
            await self._household.restart("a")
            self._holder_died.clear()
            self.outcome.asked = self._data.asked[1:]
            self._job, self._data = _job(self._fault)
            await self._train_here("left")
        self._over = True
        await asyncio.gather(*self._ends)
        self.outcome.weights = self._job.model.state_dict()
        self.outcome.asked += self._data.asked[1:]
        for name, member in self._household.members.items():
            if name not in self.outcome.dead:
                await member.service.idle.wait()
                if member.service.engagement is not None:
                    self.outcome.left_over.append(f"stages on {name}")

    async def _train_here(self, folder: str) -> None:
        """One process of the device with the data, until it is done or dead."""
        options = TrainOptions(
            wait_for=DEVICES,
            planner="pp",
            steps=STEPS,
            checkpoint=self._folder / "checkpoints" if self._fault.checkpoints else None,
            checkpoint_every=2,
            out=self._folder / "weights",
        )
        state = StateFolder(self._folder / folder)
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
    with tempfile.TemporaryDirectory() as folder, _complaints() as complaints:
        with patch.object(household_plan, "make_plan", forced):
            async with asyncio.timeout(RUN_SECONDS), devices(DEVICES, profiles=_PROFILES) as here:
                if fault.coordinator != "a":
                    here.mesh.elect(fault.coordinator)
                run = _Run(here, fault, Path(folder))
                try:
                    await run.train()
                finally:
                    failpoints.disarm()
        gc.collect()  # a future that nobody looked at says so when it goes
        left = [task.get_name() for task in asyncio.all_tasks() - before]
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
    """The run that `fault`'s must not be told from."""
    return await outcome_of(replace(fault, name="", first="", coordinator="a", kills=()))


def problems(found: Outcome, wanted: Outcome, fault: Fault) -> list[str]:
    """Everything in which a run shows what went wrong in it."""
    checks: Sequence[Callable[[Outcome, Outcome], list[str]]] = (
        _steps,
        _exact_curve if fault.is_exact else _near_curve,
        _samples,
        _people,
    )
    return [*(one for check in checks for one in check(found, wanted)), *found.left_over]


def _steps(found: Outcome, wanted: Outcome) -> list[str]:
    steps = [event.step for event in found.events if isinstance(event, Step)]
    if steps != list(range(1, STEPS + 1)):
        return [f"steps {steps}"]
    evaluated = [step for step, _ in found.evaluations]
    expected = [step for step, _ in wanted.evaluations]
    return [] if evaluated == expected else [f"evaluations {evaluated} instead of {expected}"]


def _exact_curve(found: Outcome, wanted: Outcome) -> list[str]:
    pairs = zip(found.losses, wanted.losses, strict=False)
    wrong = [step for step, (mine, its) in enumerate(pairs, 1) if mine != its]
    told = [f"other losses from step {wrong[0]} on"] if wrong else []
    if found.evaluations != wanted.evaluations:
        told.append("other evaluations")
    weights = [n for n, t in wanted.weights.items() if not torch.equal(t, found.weights[n])]
    return [*told, f"other bits in {', '.join(weights)}"] if weights else told


def _near_curve(found: Outcome, wanted: Outcome) -> list[str]:
    pairs = zip(found.losses, wanted.losses, strict=False)
    most = max(abs(mine - its) for mine, its in pairs)
    return [f"losses differ by {most:.1e}"] if most > LOSS_TOLERANCE else []


def _samples(found: Outcome, wanted: Outcome) -> list[str]:
    """Each plan's data begin where an update that counts ended, and go on in the one order."""
    (order,) = wanted.asked
    for number, asked in enumerate(found.asked, 1):
        starts = range(0, len(order) + 1, BATCH)
        if not any(order[start : start + len(asked)] == asked for start in starts):
            return [f"samples out of order in plan {number}"]
    last = found.asked[-1]
    return [] if not last or last == order[-len(last) :] else ["the last plan's samples stop early"]


def _people(found: Outcome, _wanted: Outcome) -> list[str]:
    told = []
    failures = [event.name for event in found.events if isinstance(event, Failure)]
    if len(failures) != len(set(failures)) or not set(failures) <= set(found.dead):
        told.append(f"failures {failures} of {found.dead}")
    epochs = [event.epoch for event in found.events if isinstance(event, PlanEvent)]
    if epochs != sorted(set(epochs)):
        told.append(f"epochs {epochs}")
    return told


# -- which there are -----------------------------------------------------------------------------

_PIECES = (  # (name, stages where it is not reached); several times a round
    ("forward.receive.before", ""),
    ("forward.receive.after", ""),
    ("forward.compute.after", ""),
    ("forward.send.before", "d"),
    ("forward.send.after", "d"),
    ("backward.receive.before", ""),
    ("backward.receive.after", ""),
    ("backward.compute.after", ""),
    ("backward.send.before", "b"),
    ("backward.send.after", "b"),
)
_ROUND = (  # once a round
    ("ties.send.before", "c"),
    ("ties.receive.after", "bc"),
    ("norms.send.before", ""),
    ("done.send.before", ""),
    ("done.send.after", ""),
    ("commit.receive.before", ""),
    ("update.before", ""),
    ("update.after", ""),
    ("version.after", ""),
)
_DECISION = ("decide.before", "report.after", "commit.send.between")
_CHANGE = (
    "inventory.receive.before",
    "inventory.answer.before",
    "prepare.receive.before",
    "build.after",
    "ready.send.before",
    "begin.receive.before",
)
_OFFICE = ("planned.after", "prepare.send.between", "answer.before")
_BEGIN = ("accept.before", "begin.send.between", "replay.first")
_GROUP = ("bucket.send.before", "bucket.receive.after", "update.before", "update.after")


def every_fault() -> list[Fault]:
    """Every failpoint with every stage that dies there, alone and while others are gone already."""
    return [
        *_in_rounds(),
        *_in_changes(),
        *_of_the_coordinator(),
        *_at_the_end(),
        *_of_groups(),
        *_of_the_holder(),
    ]


def _in_rounds() -> Iterator[Fault]:
    for device in "bcd":
        for names, counts in ((_PIECES, (1, 7)), (_ROUND, (1, 3))):
            for name, not_at in names:
                if device not in not_at:
                    yield from (Fault(name, device, device, count) for count in counts)
        for name in _DECISION:
            yield from (Fault(name, device, "a", count) for count in (1, 2))
        yield Fault("backward.weights.after", device, device, 2, stages=ZERO_BUBBLE)


def _in_changes() -> Iterator[Fault]:
    for name in _CHANGE:
        yield from (Fault(name, device, device, first="cut") for device in "bcd")
        for device in "bde":
            yield Fault(name, device, device, first="c", may_miss=device == "e")
    for device in "bde":
        yield Fault("fetch.between", device, device, first="c", may_miss=True)
    for name in _BEGIN:
        yield from (Fault(name, device, "a", first="cut") for device in "bcd")
        yield from (Fault(name, device, "a", first="b") for device in "cde")


def _of_the_coordinator() -> Iterator[Fault]:
    for name in _OFFICE:
        for first in ("cut", "c"):
            for victim in "bcde":
                if victim != first:
                    yield Fault(name, victim, "e", first=first, coordinator="e")
        yield Fault(name, "d", "d", first="cut", coordinator="d")
        yield Fault(name, "d", "d", first="b", coordinator="d")
    for name in _CHANGE:
        yield Fault(name, "e", "b", first="cut", coordinator="e")


def _at_the_end() -> Iterator[Fault]:
    for device in "bcd":
        for count in (1, 2):
            yield Fault("home.between", device, "a", count)
            yield Fault("checkpoint.gather.between", device, "a", count, checkpoints=True)


def _of_groups() -> Iterator[Fault]:
    for device in "cd":
        for name in _GROUP:
            yield from (Fault(name, device, device, count, stages=GROUP) for count in (1, 2))


def _of_the_holder() -> Iterator[Fault]:
    """It has the first stage; what only it comes to as the one with the data is not said twice."""
    for names, counts in ((_PIECES, (1, 7)), (_ROUND, (1, 3))):
        for name, not_at in names:
            if "b" not in not_at:
                yield from (Fault(name, "a", "a", count) for count in counts)
    for name in _DECISION:
        yield from (Fault(name, "a", "a", count) for count in (1, 2))
    for name in (*_CHANGE, *_BEGIN, *_OFFICE):
        yield Fault(name, "a", "a", first="cut")
        yield Fault(name, "a", "a", first="c")
    yield Fault("fetch.between", "a", "a", first="c", may_miss=True)
    yield from (Fault("home.between", "a", "a", count) for count in (1, 2))
    yield Fault("weights.written", "a", "a")
    yield Fault("checkpoint.gather.between", "a", "a", checkpoints=True)


def random_fault(seed: int) -> Fault:
    """One device or two die at any moment."""
    chance = random.Random(seed)
    count = chance.choice((1, 1, 2))
    kills = tuple(
        (chance.randint(1, STEPS), chance.uniform(0.0, 0.06), name)
        for name in chance.sample("bcde", count)
    )
    return Fault("", kills=kills, coordinator=chance.choice("abcde"))
