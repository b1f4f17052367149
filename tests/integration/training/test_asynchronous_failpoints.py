"""A device dies anywhere in an asynchronous job: the result is that of some cut, never a mixture.

Copies are made every few updates and the first weights are no way back, so that every way out leads
through copies made while mini-batches were under way.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from p2ptrain import failpoints
from p2ptrain.events import Event, Failure, Step
from p2ptrain.failpoints import Reached
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.recovery.version import Version
from tests.integration.training.delayed import Generations, delayed_job, options
from tests.integration.training.household import NO_FIRST_WEIGHTS, Devices, devices, hold_rounds
from tests.support.memory_household import memory_id
from tests.support.thorough import examples_of

STEPS = 20
EVERY = 4
"""Updates from one kept version to the next."""

MORE_PLACES = [
    ("forward.receive.before", "b", 3),
    ("forward.send.after", "b", 2),
    ("backward.compute.after", "c", 2),
    ("backward.send.before", "c", 1),
    ("done.send.before", "b", 1),
]
PLACES = [
    *(MORE_PLACES if examples_of(1) > 1 else ()),
    ("forward.compute.after", "c", 1),
    ("backward.receive.after", "b", 4),
    ("done.send.after", "c", 3),
    ("replica.copied", "b", 1),
    ("replica.offer.after", "c", 1),
    ("replica.whole.before", "c", 1),
    ("replica.kept.after", "b", 1),
    ("stable.before", "c", 1),
    ("versions.keep.between", "b", 1),
]


class Death:
    """Kills a device where somebody comes to a failpoint, once a version is stable."""

    def __init__(self, household: Devices, name: str, victim: str, count: int) -> None:
        self.generations = Generations(household)
        self.killed: asyncio.Task[None] | None = None
        self._household, self._loop = household, asyncio.get_running_loop()
        self._place = (name, victim, count)
        self.is_stable = self._is_armed = False

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See when a version can be gone back to; rounds wait for that, however slow copies are."""
        tell, death = SnapshotManager.keep_only, self

        def keep_only(
            copies: SnapshotManager, versions: tuple[Version, ...], members: object
        ) -> None:
            death.is_stable = True
            tell(copies, versions, members)  # type: ignore[arg-type]

        monkeypatch.setattr(SnapshotManager, "keep_only", keep_only)
        hold_rounds(monkeypatch, 3 * EVERY, lambda: death.is_stable)

    def listen(self, event: Event) -> None:
        self._household.events.append(event)
        if isinstance(event, Step) and self.is_stable and not self._is_armed:
            self._is_armed = True
            name, victim, count = self._place
            is_holders = name.startswith(("stable.", "versions."))
            device = None if is_holders else memory_id(victim)
            failpoints.arm(name, self._dies, device=device, count=count)

    def _dies(self, reached: Reached) -> asyncio.Future[None] | None:
        victim = self._place[1]
        if self.killed is None:
            self._household.mesh.freeze(victim)  # at once nothing comes from it any more
            self.killed = asyncio.create_task(self._household.mesh.kill(victim))
        return self._loop.create_future() if reached.device == memory_id(victim) else None


@pytest.mark.parametrize(("name", "victim", "count"), PLACES)
async def test_whichever_device_dies_wherever(
    name: str, victim: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(SnapshotManager, "wants", lambda _, step: step % EVERY == 0)
    job, how = delayed_job(), AsyncOptions()
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        death = Death(household, name, victim, count)
        death.watch(monkeypatch)
        try:
            with death.generations.watched():
                await household.holder_run(job, options(3, how, STEPS), death.listen).run()
        finally:
            failpoints.disarm()
        assert death.killed is not None, "nobody came there"
        await death.killed
        assert [e.name for e in household.events if isinstance(e, Failure)] == [victim]
        death.generations.assert_by_formula(job, delayed_job, how, STEPS)
        assert all(version % EVERY == 0 for version, _, _ in death.generations.begun)
        for survivor in {"a", "b", "c"} - {victim}:
            await household.until_idle(survivor)
