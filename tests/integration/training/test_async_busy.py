"""Equal devices compute nearly all the time where nobody waits for a round to end.

A household in memory, run by the real runtime: stages, orders, credits and links are those of
training, but a forward and a backward of a whole mini-batch take a given time of every device's
compute thread, which sleeps; so devices do not share this machine's cores. Busy is the part of the
time, without start-up and end, that a device's tasks take. Synchronous rounds have as many
micro-batches as given, of which each takes its part of the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

from p2ptrain.coordinator import plan_cluster
from p2ptrain.holder.planning.replan_watcher import ReplanWatcher
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.model.stage.stage import Stage
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.schedule import usual_warmup
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.recovery.commit import Seat
from tests.integration.training.household import devices

BATCH = 8
WINDOW = 32


@dataclass(frozen=True)
class Setting:
    """Seconds of a whole mini-batch on each device; synchronously cut into micro-batches."""

    devices: int
    forward: float
    backward: float
    steps: int
    micro_batches: int | None = None


@dataclass(frozen=True)
class Result:
    """Of a mini-batch in the middle.

    Attributes:
        busy: part of the time, by stage.
        processor: seconds of the processor for all devices together: what the runtime costs.
    """

    seconds: float
    busy: tuple[float, ...]
    processor: float


@dataclass
class Found:
    """What the holder heard: when each mini-batch ended, and what its tasks took by stage.

    Attributes:
        processor: seconds of the processor that the whole household had taken by then.
    """

    ends: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    busy: list[Mapping[Seat, CpuSpan]] = field(default_factory=list)

    def result(self, skipped: int) -> Result:
        """Without the first and the last mini-batches."""
        first, last = skipped, len(self.ends) - skipped - 1
        seconds = self.ends[last] - self.ends[first]
        seats = sorted(self.busy[first])
        parts = [
            sum(spans[seat].wall for spans in self.busy[first + 1 : last + 1]) / seconds
            for seat in seats
        ]
        processor = self.processor[last] - self.processor[first]
        return Result(seconds / (last - first), tuple(parts), processor / (last - first))


def model(blocks: int) -> torch.nn.Module:
    """As many equal units as devices."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(blocks)))


def plan(
    setting: Setting, profile: Profile, cluster: Cluster, request: PlanRequest, **_: object
) -> Plan:
    """Equal parts of the units, one device a stage."""
    count, units = setting.devices, len(profile.units)
    names = sorted(device.name for device in cluster.devices)
    asynchronous = request.mode is PlanMode.ASYNC
    split = (
        BatchSplit(BATCH * WINDOW, BATCH)
        if asynchronous
        else BatchSplit(BATCH, BATCH // (setting.micro_batches or 1))
    )
    depths = tuple(range(count, 0, -1))
    if not asynchronous:
        depths = usual_warmup(count, split.micro_batches)
    stages = tuple(
        PlannedStage(
            (p * units // count, (p + 1) * units // count),
            (DeviceShare(name, split.micro_batch),),
            depths[p],
        )
        for p, name in enumerate(names)
    )
    peaks = dict.fromkeys(names, 0)
    return Plan("auto", split, stages, Predicted(1.0, BATCH, peaks), mode=request.mode)


@contextmanager
def sleeping(setting: Setting, found: Found) -> Iterator[None]:
    """Stages take the given time; what the holder hears is noted."""
    forward, backward, busy = Stage.forward, Stage.backward, ReplanWatcher.busy
    pieces = setting.micro_batches or 1

    def slow_forward(stage: Stage, *args: Any, **options: Any) -> Any:
        time.sleep(setting.forward / pieces)
        return forward(stage, *args, **options)

    def slow_backward(stage: Stage, *args: Any, **options: Any) -> Any:
        time.sleep(setting.backward / pieces)
        return backward(stage, *args, **options)

    def noted(
        replan_watcher: ReplanWatcher, spans: Mapping[Seat, CpuSpan], *, copying: bool
    ) -> None:
        found.ends.append(time.monotonic())
        found.processor.append(time.process_time())
        found.busy.append(spans)
        busy(replan_watcher, spans, copying=copying)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Stage, "forward", slow_forward))
        stack.enter_context(patch.object(Stage, "backward", slow_backward))
        stack.enter_context(patch.object(ReplanWatcher, "busy", noted))
        forced = partial(plan, setting)
        stack.enter_context(patch.object(plan_cluster, "make_plan", forced))
        yield


async def measure(setting: Setting) -> Result:
    """Train once."""
    data = [(torch.ones(4), 0)] * (BATCH * setting.steps)
    size = None if setting.micro_batches is None else BATCH // setting.micro_batches
    job = Job(
        model(setting.devices),
        data,
        cross_entropy,
        SGD(lr=0.01),
        batch_size=BATCH,
        micro_batch=size,
    )
    found = Found()
    asynchrony = None if setting.micro_batches else AsyncOptions()
    chosen = TrainOptions(
        wait_for=setting.devices,
        planner="pp",
        mode="sync" if asynchrony is None else "async",
        asynchrony=asynchrony,
    )
    async with devices(setting.devices) as household:
        with sleeping(setting, found):
            await household.holder_run(job, chosen).run()
    return found.result(setting.devices)


TRIES = 3
"""Tasks are real time here: where the machine does other things meanwhile, they take longer."""


async def test_without_a_barrier_devices_wait_less_than_with_one() -> None:
    """Three stages and two micro-batches: half of a round is waiting, and none of it without.

    What messages cost here, beside other work on the same machine, counts as waiting: tasks are
    long beside that.
    """
    seen = []
    while not any(_shows_it(*one) for one in seen):
        assert len(seen) < TRIES, seen
        free = await measure(Setting(3, 0.05, 0.1, steps=9))
        seen.append((free, await measure(Setting(3, 0.05, 0.1, steps=9, micro_batches=2))))


def _shows_it(free: Result, rounds: Result) -> bool:
    waits_less = min(free.busy) > max(rounds.busy) + 0.1
    return waits_less and max(rounds.busy) < 0.55 and free.seconds < 0.8 * rounds.seconds
