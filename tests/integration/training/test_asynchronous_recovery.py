"""Without a barrier too, a death goes back to one version of all stages, never to a mixture."""

from __future__ import annotations

import asyncio

import pytest
import torch

from p2ptrain.events import Event, Failure, Plan, Recovered, Step
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.recovery.version import Version
from tests.integration.training.delayed import by_formula, delayed_job, options
from tests.integration.training.household import OFTEN_COPIED, Devices, devices
from tests.integration.training.jobs import assert_same_weights, steps_of

STASHED, TWO_VERSIONS = AsyncOptions(), AsyncOptions(Weights.DOUBLE)
STEPS = 36


class Killing:
    """Kills a device at a step, once there is a kept version to go back to."""

    def __init__(self, household: Devices, name: str) -> None:
        self.household, self.name = household, name
        self.killed: asyncio.Task[None] | None = None
        self.stable: list[Version] = []

    def listen(self, event: Event) -> None:
        self.household.events.append(event)
        if isinstance(event, Step) and self.stable and self.killed is None:
            self.killed = asyncio.create_task(self.household.mesh.kill(self.name))

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which versions become stable."""
        tell, killing = SnapshotManager.keep_only, self

        def keep_only(
            copies: SnapshotManager, versions: tuple[Version, ...], members: object
        ) -> None:
            killing.stable.append(versions[0])
            tell(copies, versions, members)  # type: ignore[arg-type]

        monkeypatch.setattr(SnapshotManager, "keep_only", keep_only)


@pytest.mark.parametrize(
    ("name", "how"),
    [("b", STASHED), ("c", STASHED), ("b", AsyncOptions(aggregate=1)), ("b", TWO_VERSIONS)],
)
async def test_a_death_goes_back_to_a_cut_through_all_stages(
    name: str, how: AsyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From there the pipeline begins empty: to the bit what the formula gives with that cut."""
    torch.set_num_threads(1)
    piece = 2 if how is TWO_VERSIONS else None
    job = delayed_job(micro_batch=piece)
    async with devices(3, settings=OFTEN_COPIED) as household:
        killing = Killing(household, name)
        killing.watch(monkeypatch)
        await household.holder_run(job, options(3, how, STEPS), killing.listen).run()
        for survivor in {"a", "b", "c"} - {name}:
            await household.until_idle(survivor)
    (recovered,) = (event for event in household.events if isinstance(event, Recovered))
    assert [event.name for event in household.events if isinstance(event, Failure)] == [name]
    assert steps_of(household) == list(range(1, STEPS + 1)), "each step once, in order"
    before = household.events[: household.events.index(recovered)]
    told = sum(isinstance(event, Step) for event in before)
    assert killing.stable[0].step <= recovered.version <= told
    assert recovered.replayed_steps == told - recovered.version
    cuts = [
        [list(stage.parameters) for stage in event.stages]
        for event in household.events
        if isinstance(event, Plan)
    ]
    first, last = cuts[0], cuts[-1]
    assert (len(first), len(last)) == (3, 2)
    undisturbed = by_formula(delayed_job(), first, how, told, micro_batch=piece)
    disturbed = by_formula(
        delayed_job(), first, how, STEPS, {recovered.version: last}, micro_batch=piece
    )
    assert household.losses == undisturbed.losses + disturbed.losses[told:]
    assert_same_weights(job, disturbed)
