"""Two neighbours die at once, each with the other's copies: the holder's copy of all has both."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2ptrain.errors import OptionError
from p2ptrain.events import Event, Failure, Plan, Recovered, Step
from p2ptrain.holder import trainer
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.holder.reports import plan_event
from p2ptrain.holder.snapshots.full_snapshots import FullSnapshots
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.recovery.version import Version
from tests.integration.training.household import OFTEN_COPIED, devices, hold_rounds
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)

STEPS, EVERY, DEATH = 12, 3, 8


async def test_two_neighbours_are_lost_and_the_copy_of_all_is_gone_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    held: list[Version] = []
    take = FullSnapshots._take

    async def noted(copies: FullSnapshots, version: Version) -> None:
        await take(copies, version)
        held.extend([copies.held] if copies.held else [])

    monkeypatch.setattr(FullSnapshots, "_take", noted)
    wanted, job = undisturbed(momentum_job(), STEPS), momentum_job()
    killing: list[asyncio.Task[None]] = []
    async with devices(3, settings=OFTEN_COPIED) as household:

        async def kill() -> None:
            for name in ("b", "c"):
                household.mesh.freeze(name)
            await asyncio.gather(*(household.mesh.kill(name) for name in ("b", "c")))

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == DEATH:
                killing.append(asyncio.create_task(kill()))

        hold_rounds(monkeypatch, DEATH - 1, lambda: bool(held))
        options = replace(one_stage_each(3, STEPS), whole_copies=EVERY)
        await household.holder_run(job, options, listen).run()
        await asyncio.gather(*killing)
        assert_undisturbed(household, job, wanted)
    assert sorted(e.name for e in household.events if isinstance(e, Failure)) == ["b", "c"]
    (recovered,) = [event for event in household.events if isinstance(event, Recovered)]
    assert recovered.version in {version.step for version in held}
    assert recovered.version >= EVERY


@pytest.mark.parametrize(
    ("every", "writes", "copies"), [(None, False, 0), (EVERY, False, 2), (None, True, 1)]
)
async def test_the_plan_says_what_they_take_of_the_holder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int | None, writes: bool, copies: int
) -> None:
    """Of weights and momentum: one is held while the next one comes, one is being written."""
    torch.set_num_threads(1)
    beside: list[dict[str, int]] = []

    def announced(
        answer: ReconfigureReply, model: ModelDescription, reason: str, *more: dict[str, int]
    ) -> Plan:
        known = plan_event(answer, model, reason).predicted_peak_bytes
        event = plan_event(answer, model, reason, *more)
        beside.append({d: n - known[d] for d, n in event.predicted_peak_bytes.items()})
        return event

    monkeypatch.setattr(trainer, "plan_event", announced)
    job = momentum_job()
    weights = sum(tensor.nbytes for tensor in job.model.state_dict().values())
    async with devices(3) as household:
        options = one_stage_each(3, 1)
        folder = tmp_path if writes else None
        options = replace(options, whole_copies=every, checkpoint=folder)
        await household.holder_run(job, options, household.events.append).run()
    assert beside == [{"a": copies * 2 * weights, "b": 0, "c": 0}]


@pytest.mark.parametrize("options", [{"whole_copies": 0}, {"whole_copies": 5, "replicas": False}])
def test_what_cannot_be_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="whole_copies"):
        TrainOptions(**options)  # type: ignore[arg-type]
