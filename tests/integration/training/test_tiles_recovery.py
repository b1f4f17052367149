"""A device with tiles dies: its filters are on the others, and nothing in the result shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

from p2ptrain.events import Event, Failure, Plan, Recovered, Step
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.tensors import MicroBatchSlice
from p2ptrain.runtime.tiled.tiled_executor import TileExchange
from p2ptrain.tiling.kernels.tile_steps import GradientSums, HaloGradient, Moments, TileMessage
from tests.integration.training.household import Devices, devices
from tests.integration.training.test_recovery_holder import Process
from tests.integration.training.test_tiles import TOLERANCE, check_replicas, job
from tests.integration.training.test_tiles_shared_rest import long_rest
from tests.support.curves import by_plain_torch, difference
from tests.support.reference import Outcome

STEPS = 14


async def train(household: Devices, kills: dict[int, Sequence[str]]) -> Outcome:
    """With deaths by the step whose report these devices do not outlive."""
    what, killing = job(), list[asyncio.Task[None]]()

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step):
            if event.step == STEPS:
                check_replicas(household)
            dying = kills.get(event.step, ())
            killing.extend(asyncio.create_task(household.mesh.kill(name)) for name in dying)

    options = TrainOptions(
        wait_for=len(household.names), planner="tiles", steps=STEPS, groups=(0, 1, 2, 3)
    )
    await household.holder_run(what, options, listen).run()
    await asyncio.gather(*killing)
    assert isinstance(what.model, nn.Module)
    state = {name: tensor.detach().clone() for name, tensor in what.model.state_dict().items()}
    return Outcome(list(household.losses), state)


def assert_exact(ours: Outcome) -> None:
    found = difference(ours, by_plain_torch(job(), STEPS))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


@pytest.mark.parametrize(
    "kills",
    [{4: ["b"]}, {4: ["c"]}, {3: ["d"], 8: ["b"]}, {5: ["b", "c"]}, {6: ["b", "c", "d"]}],
    ids=str,
)
async def test_whichever_device_dies_the_others_have_its_filters(
    kills: dict[int, Sequence[str]],
) -> None:
    """Also down to the holder alone, which has the whole model then."""
    dead = {name for names in kills.values() for name in names}
    async with devices(4) as household:
        assert_exact(await train(household, dict(kills)))
        events = household.events
        assert [e.step for e in events if isinstance(e, Step)] == list(range(1, STEPS + 1))
        assert {e.name for e in events if isinstance(e, Failure)} == dead
        used = {d.name for stage in household.plan.stages for d in stage.devices}
        assert used == {"a", "b", "c", "d"} - dead
        tiled = household.plan.stages[0].allocation == "tiles"
        assert tiled is (len(used) > 1)


@pytest.mark.parametrize("victim", ["c", "d"])
async def test_where_several_share_the_rest_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """One of those that share it dies, or one with tiles."""
    long_rest(monkeypatch)
    async with devices(4) as household:
        assert_exact(await train(household, {4: [victim]}))
        before, *_, after = [e for e in household.events if isinstance(e, Plan)]
    parts = [[device.name for device in stage.devices] for stage in before.stages]
    assert [len(names) for names in parts] == [2, 2]
    assert (victim in parts[1]) is (victim == "c")
    assert victim not in {d.name for stage in after.stages for d in stage.devices}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("dies_too", ["", "b"])
async def test_the_device_with_the_data_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_too: str, is_shared: bool
) -> None:
    """Also where one with tiles has died meanwhile, for good."""
    if is_shared:
        long_rest(monkeypatch)
    options = TrainOptions(wait_for=4, planner="tiles", steps=STEPS, groups=(0, 1, 2, 3))
    async with devices(4) as household:
        process = Process(household, tmp_path, job(), options)
        process.at_step(5)
        await process.ended()
        await household.until_waiting("b", "c", "d")
        if dies_too:
            await household.mesh.kill(dies_too)
        await household.restart("a")
        what = job()
        await household.holder_run(what, options, folder=process.left).run()
        assert [e.step for e in household.events if isinstance(e, Step)] == [*range(1, STEPS + 1)]
        used = {d.name for stage in household.plan.stages for d in stage.devices}
        assert used == set("abcd") - {dies_too}
        assert household.plan.stages[0].allocation == "tiles"
        assert isinstance(what.model, nn.Module)
        state = {name: tensor.detach() for name, tensor in what.model.state_dict().items()}
        assert_exact(Outcome(list(household.losses), state))


@pytest.mark.parametrize("subject", [Moments, GradientSums, HaloGradient])
async def test_a_death_in_the_middle_of_a_pass(
    monkeypatch: pytest.MonkeyPatch, subject: type
) -> None:
    """While others wait for what it would have sent them."""
    async with devices(3) as household:
        send, dying = TileExchange.send, list[asyncio.Task[None]]()
        victim = household.mesh["c"].self_id

        async def dies(
            exchange: TileExchange, piece: MicroBatchSlice, messages: Sequence[TileMessage]
        ) -> None:
            is_there = exchange._own == victim and piece.key.round == 4
            if is_there and any(isinstance(message.subject, subject) for message in messages):
                if not dying:
                    dying.append(asyncio.create_task(household.mesh.kill("c")))
                await asyncio.Event().wait()
            await send(exchange, piece, messages)

        monkeypatch.setattr(TileExchange, "send", dies)
        assert_exact(await train(household, {}))
        await asyncio.gather(*dying)
        assert dying
        plans = [e for e in household.events if isinstance(e, Plan)]
        assert [plan.reason for plan in plans] == ["start", "failure"]
        (recovered,) = [e for e in household.events if isinstance(e, Recovered)]
        assert recovered.replayed_steps <= 4
