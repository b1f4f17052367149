"""A stage dies of which nobody keeps a copy: a checkpoint has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from p2ptrain import events
from p2ptrain.events import Event, Recovered, Step
from p2ptrain.holder.snapshots import full_snapshots
from p2ptrain.job.job import Job
from p2ptrain.state.checkpoint_files import INDEX, MODEL, WrittenCheckpoint
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)

STEPS = 10
EVERY = 2
DEATH = 7


async def _with_a_death(
    household: Devices,
    job: Job,
    folder: Path,
    before: Callable[[], None] | None = None,
    death: int = DEATH,
) -> None:
    killing: list[asyncio.Task[None]] = []

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step) and event.step == death:
            if before is not None:
                before()
            killing.append(asyncio.create_task(household.mesh.kill("b")))

    options = replace(
        one_stage_each(3, STEPS), replicas=False, checkpoint=folder, checkpoint_every=EVERY
    )
    await household.holder_run(job, options, listen).run()
    await asyncio.gather(*killing)


async def test_training_goes_on_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    load = full_snapshots.load_written

    def counting(written: WrittenCheckpoint, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        read.append(int(written.place.name.removeprefix("step-")))
        return load(written, wanted)

    monkeypatch.setattr(full_snapshots, "load_written", counting)
    wanted, job = undisturbed(momentum_job(), STEPS), momentum_job()
    async with devices(3) as household:
        await _with_a_death(household, job, tmp_path)
        assert_undisturbed(household, job, wanted)
        (recovered,) = [event for event in household.events if isinstance(event, Recovered)]
        assert recovered.replayed_steps <= 2 * EVERY + 1
        assert read
        assert set(read) <= {2, 4, 6}


def _damage(file: Path) -> None:
    """One bit of its last tensor, which no reader of the format notices."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_a_damaged_checkpoint_is_gone_back_behind(tmp_path: Path, all_of_them: bool) -> None:
    """It is never taken for what it was; the one before it will do, or the first weights.

    Step 8 was ordered when the checkpoint of step 6 was whole; that of step 8 never will be.
    """
    damaged: list[str] = []

    def damage() -> None:
        index = json.loads((tmp_path / INDEX).read_text())
        damaged[:] = [file.name for file in tmp_path.glob("step-*")]
        if not all_of_them:
            damaged[:] = [index["folder"]]
        for name in damaged:
            _damage(tmp_path / name / MODEL)

    wanted, job = undisturbed(momentum_job(), STEPS), momentum_job()
    async with devices(3) as household:
        await _with_a_death(household, job, tmp_path, damage, death=DEATH + 1)
        assert_undisturbed(household, job, wanted)
        told = [event.message for event in household.events if isinstance(event, events.Warning)]
        (recovered,) = [event for event in household.events if isinstance(event, Recovered)]
    newest = max(int(name.removeprefix("step-")) for name in damaged)
    assert any("damaged" in line and f"{newest:08d}" in line for line in told)
    assert (recovered.version == 0) is all_of_them
