"""The holder's way from generation to generation: what waits for the disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from p2ptrain.events import Plan
from p2ptrain.holder.start.journal import JOB_FILE
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from tests.integration.training.household import devices
from tests.integration.training.jobs import make_job

ALONE = TrainOptions(planner="single", steps=2)


async def test_a_slow_disk_holds_up_what_people_hear_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loop = StateFolder(tmp_path / "job"), asyncio.get_running_loop()
    write, may_go_on = folder.write_json, threading.Event()
    begun = asyncio.Event()

    def slow(name: str, value: object) -> None:
        if name == JOB_FILE and isinstance(value, dict) and value["plan"] is not None:
            loop.call_soon_threadsafe(begun.set)
            may_go_on.wait(20.0)
        write(name, value)

    monkeypatch.setattr(folder, "write_json", slow)
    async with devices(1) as household:
        run = asyncio.create_task(household.holder_run(make_job(), ALONE, folder=folder).run())
        await begun.wait()  # which shows that the event loop goes on
        for _ in range(100):
            await asyncio.sleep(0)
        assert not [event for event in household.events if isinstance(event, Plan)]
        may_go_on.set()
        await run
        assert household.plan.epoch == 1
        assert len(household.losses) == 2
