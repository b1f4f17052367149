"""Devices of an asynchronous stage take mini-batches in turn: still the formula, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from p2ptrain import events, failpoints
from p2ptrain.coordinator import plan_cluster
from p2ptrain.events import Event, Failure, Recovered, Step
from p2ptrain.failpoints import Reached
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.weight_versions import depths_of
from tests.integration.training.delayed import by_formula, cut_of, delayed_job, options
from tests.integration.training.group_plans import DEALT
from tests.integration.training.household import NO_FIRST_WEIGHTS, devices
from tests.integration.training.jobs import assert_same_weights, assert_undisturbed, steps_of
from tests.support.memory_household import memory_id

STASHED = AsyncOptions()
Shares = Sequence[Sequence[int]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def dealt(
    shares: Shares, profile: Profile, cluster: Cluster, request: PlanRequest, **_rest: object
) -> Plan:
    """Equal parts of the units; the devices of a stage take mini-batches by their shares."""
    assert request.mode is PlanMode.ASYNC
    names = iter(sorted(device.name for device in cluster.devices))
    units, count = len(profile.units), len(shares)
    window = max(sum(own) for own in shares if len(own) > 1) if any(map(_several, shares)) else 32
    split = BatchSplit(window * request.batch_size, request.batch_size)
    depths = depths_of([len(own) for own in shares])
    stages = tuple(
        PlannedStage(
            (p * units // count, (p + 1) * units // count),
            tuple(DeviceShare(next(names), share) for share in _shares(own, split)),
            depths[p],
            DEALT,
        )
        for p, own in enumerate(shares)
    )
    peaks = {device.name: 0 for device in cluster.devices}
    return Plan("auto", split, stages, Predicted(1.0, 1.0, peaks), mode=PlanMode.ASYNC)


def _several(own: Sequence[int]) -> bool:
    return len(own) > 1


def _shares(own: Sequence[int], split: BatchSplit) -> Sequence[int]:
    """A device alone takes all of the window."""
    return own if _several(own) else (split.micro_batches,)


def force(monkeypatch: pytest.MonkeyPatch, shares: Shares) -> None:
    monkeypatch.setattr(plan_cluster, "make_plan", partial(dealt, shares))


@pytest.mark.parametrize(
    ("shares", "steps"),
    [
        ([(4, 4)], 36),
        ([(5, 3), (8,)], 36),
        ([(8,), (4, 4)], 36),
        ([(8,), (4, 4)], 1),
        ([(3, 3, 2), (8,)], 36),
        ([(4, 4), (5, 3)], 36),
        ([(8,), (6, 2), (8,)], 36),
        ([(31, 1), (32,)], 36),
        ([(31, 1), (32,)], 1),
    ],
    ids=str,
)
async def test_losses_and_weights_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, shares: Shares, steps: int
) -> None:
    force(monkeypatch, shares)
    count = [len(own) for own in shares]
    job = delayed_job()
    async with devices(sum(count)) as household:
        chosen = options(sum(count), STASHED, steps, planner="auto")
        await household.holder_run(job, chosen).run()
        assert [len(stage.devices) for stage in household.plan.stages] == count
        names = cut_of(household)
    wanted = by_formula(delayed_job(), names, STASHED, steps, devices={0: count})
    assert_undisturbed(household, job, wanted)


async def test_an_evaluation_empties_the_pipeline_of_groups_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(monkeypatch, [(4, 4), (8,)])
    job = delayed_job(eval_data=delayed_job().data)
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 14, planner="auto")).run()
        names = cut_of(household)
    empty, counts = dict.fromkeys((6, 12), names), dict.fromkeys((0, 6, 12), (2, 1))
    wanted = by_formula(delayed_job(), names, STASHED, 14, empty=empty, devices=counts)
    assert_undisturbed(household, job, wanted)


async def test_a_death_in_a_group_goes_back_to_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other device of the stage has the same copy; the new plan is one stage after another.

    b dies with gradients that the stage behind has applied and a has not: no version but a kept one
    is whole.
    """
    steps, every = 40, 4
    force(monkeypatch, [(4, 4), (8,)])
    monkeypatch.setattr(SnapshotManager, "wants", lambda _, step: step % every == 0)
    job = delayed_job()
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        killing: list[asyncio.Task[None]] = []

        def dies(_: Reached) -> asyncio.Future[None]:
            household.mesh.freeze("b")  # at once nothing comes from it any more
            killing.append(asyncio.create_task(household.mesh.kill("b")))
            return asyncio.get_running_loop().create_future()

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 3 * every + 1:
                force(monkeypatch, [(8,), (8,)])
                failpoints.arm("backward.receive.after", dies, device=memory_id("b"))

        chosen = options(3, STASHED, steps, planner="auto", recovery=ReplanMethod.HEAVY)
        try:
            await household.holder_run(job, chosen, listen).run()
        finally:
            failpoints.disarm()
        await asyncio.gather(*killing)
    assert steps_of(household) == list(range(1, steps + 1))
    seen = household.events
    assert [event.name for event in seen if isinstance(event, Failure)] == ["b"]
    first, second = (event for event in seen if isinstance(event, events.Plan))
    (recovered,) = (event for event in seen if isinstance(event, Recovered))
    assert recovered.version % every == 0
    told = sum(isinstance(event, Step) for event in seen[: seen.index(recovered)])
    cuts = [[list(stage.parameters) for stage in plan.stages] for plan in (first, second)]
    counts = {0: (2, 1), recovered.version: (1, 1)}
    before = by_formula(delayed_job(), cuts[0], STASHED, told, devices=counts)
    after = by_formula(
        delayed_job(),
        cuts[0],
        STASHED,
        steps,
        empty={recovered.version: cuts[1]},
        devices=counts,
    )
    assert household.losses == before.losses + after.losses[told:]
    assert_same_weights(job, after)
