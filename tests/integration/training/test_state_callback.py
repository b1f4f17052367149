"""Callbacks that are given what has been trained so far, on three devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import p2ptrain
from p2ptrain.errors import OptionError
from p2ptrain.events import Event, Step
from p2ptrain.job.callbacks import StateCallback, TrainedState, WantedState
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import (
    assert_same_weights,
    make_job,
    one_stage_each,
    steps_of,
    undisturbed,
)


class Taker(StateCallback):
    """Wants the state of some steps."""

    def __init__(
        self,
        *steps: int,
        wanted: WantedState = WantedState.WEIGHTS,
        act: Callable[[TrainedState], object] = lambda state: None,
    ) -> None:
        self.steps = steps
        self.seen: dict[int, dict[str, Tensor]] = {}
        self._asks_for = wanted
        self._act = act

    def stands_still_after(self, step: int) -> bool:
        return step in self.steps

    def on_step(self, event: Step) -> None:
        if event.step in self.steps:
            self.wanted = self._asks_for

    def on_state(self, state: TrainedState) -> None:
        self.wanted = WantedState.NOTHING
        assert state.step not in self.seen
        self.seen[state.step] = {name: tensor.clone() for name, tensor in state.weights.items()}
        self._act(state)


def taking(*callbacks: object, name: str = "mlp") -> Job:
    """Six updates."""
    return make_job(name, callbacks=list(callbacks))


async def run(job: Job, count: int = 3, options: TrainOptions | None = None) -> Devices:
    async with devices(count) as household:
        await household.holder_run(job, options or one_stage_each(count, 1000)).run()
        return household


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("wanted", [WantedState.WEIGHTS, WantedState.ALL])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
async def test_the_state_is_that_of_the_step(name: str, wanted: WantedState, count: int) -> None:
    taker = Taker(1, 4, 6, wanted=wanted)
    job = taking(taker, name=name)
    household = await run(job, count, TrainOptions(local=True) if count == 1 else None)
    assert list(taker.seen) == [1, 4, 6]
    for step, weights in taker.seen.items():
        expected = undisturbed(taking(name=name), step).state_dict
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected), step
    assert household.losses == undisturbed(taking(name=name)).losses
    assert_same_weights(job, undisturbed(taking(name=name)))


async def test_it_may_want_more_after_the_last_step() -> None:
    kinds: list[bool] = []

    def act(state: TrainedState) -> None:
        kinds.append(state.write_checkpoint is not None)
        taker.seen.clear()
        taker.wanted = WantedState.ALL if len(kinds) < 2 else WantedState.NOTHING

    taker = Taker(6, act=act)
    await run(taking(taker))
    assert kinds == [False, True]


async def test_a_checkpoint_of_a_step_is_gone_on_from(tmp_path: Path) -> None:
    def write(state: TrainedState) -> None:
        assert state.write_checkpoint is not None
        state.write_checkpoint(tmp_path)

    await run(taking(Taker(4, wanted=WantedState.ALL, act=write)))
    again = taking()
    household = await run(again, 2, TrainOptions(wait_for=2, planner="pp", resume=tmp_path))
    assert steps_of(household) == [5, 6]
    assert_same_weights(again, undisturbed(taking()))


async def test_it_may_end_the_training_and_fail_it() -> None:
    def stop(state: TrainedState) -> None:
        raise p2ptrain.StopTraining

    def fail(state: TrainedState) -> None:
        raise KeyError("no such column")

    job = taking(Taker(2, act=stop))
    household = await run(job)
    assert steps_of(household) == [1, 2]
    assert_same_weights(job, undisturbed(taking(), 2))
    with pytest.raises(KeyError, match="no such column") as raised:
        await run(taking(Taker(2, act=fail)))
    assert "Taker.on_state failed at step 2" in raised.value.__notes__[0]


async def test_a_device_that_dies_before_the_state_is_brought_changes_nothing() -> None:
    taker = Taker(4, wanted=WantedState.ALL)

    async with devices(3) as household:

        def at(event: Event) -> None:
            if isinstance(event, Step) and event.step == 4:
                asyncio.run_coroutine_threadsafe(household.mesh.kill("c"), loop).result(30)

        loop = asyncio.get_running_loop()
        job = taking(taker, at)
        await household.holder_run(job, one_stage_each(3, 1000)).run()
    assert steps_of(household) == [1, 2, 3, 4, 5, 6]
    expected = undisturbed(taking(), 4).state_dict
    assert all(torch.equal(taker.seen[4][key], expected[key]) for key in expected)
    assert_same_weights(job, undisturbed(taking()))


async def test_training_without_barriers_has_no_state_of_a_step() -> None:
    options = TrainOptions(wait_for=3, planner="pp", mode="async")
    with pytest.raises(OptionError, match="the callback Taker works with the state"):
        await run(taking(Taker(2)), 3, options)
