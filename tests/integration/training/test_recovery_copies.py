"""Copies of stages at neighbours: any death costs few steps, and not one bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest

from p2ptrain import events
from p2ptrain.errors import DeviceLost
from p2ptrain.events import Event, Failure, Recovered, Step
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.recovery.version import Version
from p2ptrain.worker.snapshot_service import SnapshotService
from tests.integration.training.household import NO_FIRST_WEIGHTS, OFTEN_COPIED, Devices, devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    on_step,
    one_stage_each,
    undisturbed,
)

pytestmark = pytest.mark.usefixtures("all_go_back")

STEPS = 28


def _job() -> Job:
    return momentum_job(epochs=20)


def _options(count: int) -> TrainOptions:
    return one_stage_each(count, STEPS)


@dataclass
class Course:
    """One job, in which devices die once there is something to go back to.

    Attributes:
        stable: versions as they became stable.
    """

    household: Devices
    job: Job
    monkeypatch: pytest.MonkeyPatch
    kills: list[list[str]] = field(default_factory=list)  # each a while after a stable version
    stable: list[Version] = field(default_factory=list)
    _killing: list[asyncio.Task[None]] = field(default_factory=list)
    _ready_at: int = 0

    async def run(self, options: TrainOptions) -> None:
        """Without the first weights: who is not kept is lost."""
        self.household.settings = OFTEN_COPIED
        tell, course = SnapshotManager.keep_only, self

        def keep_only(
            self: SnapshotManager, versions: Collection[Version], members: Collection[str]
        ) -> None:
            course.stable.append(next(iter(versions)))
            tell(self, versions, members)

        self.monkeypatch.setattr(SnapshotManager, "keep_only", keep_only)
        await self.household.holder_run(self.job, options, self._listen).run()
        assert not self.kills, "nothing became stable"
        await asyncio.gather(*self._killing)

    def _listen(self, event: Event) -> None:
        self.household.events.append(event)
        mesh = self.household.mesh
        if isinstance(event, Step) and self.kills and len(self.stable) > self._ready_at:
            dying = self.kills.pop(0)
            self._killing += [asyncio.create_task(mesh.kill(name)) for name in dying]
            # by then also the version that the next generation begins with
            self._ready_at = len(self.stable) + 1

    def assert_undisturbed(self, dead: Sequence[str]) -> None:
        """Nothing shows but that devices died."""
        assert_undisturbed(self.household, self.job, undisturbed(_job(), STEPS))
        assert [e.name for e in self.household.events if isinstance(e, Failure)] == dead


@pytest.mark.parametrize("name", ["b", "c"])
async def test_a_death_goes_back_to_what_its_neighbour_keeps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with devices(3) as household:
        course = Course(household, _job(), monkeypatch, [[name]])
        await course.run(_options(3))
        course.assert_undisturbed([name])
        (recovered,) = (e for e in household.events if isinstance(e, Recovered))
        assert recovered.replayed_steps < recovered_step(household.events) - 1
        for survivor in {"a", "b", "c"} - {name}:
            await household.until_idle(survivor)


def recovered_step(events: list[Event]) -> int:
    """The first new step after the recovery."""
    after = False
    for event in events:
        after = after or isinstance(event, Recovered)
        if after and isinstance(event, Step):
            return event.step
    raise AssertionError("no step after a recovery")


@pytest.mark.parametrize("kills", [[["b"], ["c"]], [["c"], ["b"], ["d"]]])
async def test_one_after_the_other_may_die_its_keeper_too(
    kills: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a generation begins with is kept again at once."""
    dead = [name for names in kills for name in names]
    async with devices(4) as household:
        course = Course(household, _job(), monkeypatch, list(kills))
        await course.run(_options(4))
        course.assert_undisturbed(dead)


async def test_where_a_keeper_has_no_memory_another_one_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with devices(3) as household:
        fails_at(monkeypatch, lambda device: device == household.mesh["b"].self_id)
        course = Course(household, _job(), monkeypatch, [["c"]])
        await course.run(_options(3))
        course.assert_undisturbed(["c"])


async def test_where_nobody_has_memory_training_goes_on_without_copies_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with devices(2) as household:
        fails_at(monkeypatch, lambda device: True)
        course = Course(household, _job(), monkeypatch)
        await course.run(_options(2))
        course.assert_undisturbed([])
        assert course.stable == []
        warnings = [e.message for e in household.events if isinstance(e, events.Warning)]
        assert len(warnings) == len(set(warnings)) <= 2
        assert all("could not keep a copy of part" in line for line in warnings)


def fails_at(monkeypatch: pytest.MonkeyPatch, is_short: Callable[[str], bool]) -> None:
    """Devices find no memory for what others offer."""
    make_sure = SnapshotService._make_sure_of_memory

    def find(self: SnapshotService, nbytes: int, slot: object) -> None:
        if is_short(self._mesh.self_id):
            raise MemoryError
        make_sure(self, nbytes, slot)  # type: ignore[arg-type]

    monkeypatch.setattr(SnapshotService, "_make_sure_of_memory", find)


async def test_a_job_without_copies_keeps_none_and_a_death_loses_it() -> None:
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        killing: list[asyncio.Task[None]] = []

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill("b")))

        options = replace(_options(3), replicas=False)
        with pytest.raises(DeviceLost, match="b is gone"):
            await household.holder_run(_job(), options, on_step(household, 20, kill)).run()
        await asyncio.gather(*killing)


async def test_one_device_and_groups_alone_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, planner in ((1, "single"), (2, "dp")):
        async with devices(count) as household:
            course = Course(household, _job(), monkeypatch)
            await course.run(replace(_options(count), planner=planner))
            assert course.stable == []
            assert not [e for e in household.events if isinstance(e, events.Warning)]
