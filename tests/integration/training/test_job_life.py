"""What surrounds the rounds: evaluation, checkpoints, failures, refusals. On devices in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from p2ptrain import events
from p2ptrain.errors import (
    CaptureError,
    OptionError,
    PeerError,
    PlanError,
    ScriptError,
    TrainingError,
)
from p2ptrain.events import Done, Eval, Event
from p2ptrain.holder.rounds.generation import HolderGeneration
from p2ptrain.holder.rounds.training_loop import TrainingLoop
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.kinds import PLAN
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.net.message import Message
from p2ptrain.state import checkpoint_files, weights_files
from tests.integration.training.household import LocalJob, devices
from tests.integration.training.jobs import (
    assert_same_weights,
    job_that_ends_in_nan,
    make_job,
    on_step,
    steps_of,
    undisturbed,
)
from tests.support import zoo


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


async def test_metrics_are_those_of_the_trained_model_after_every_generation() -> None:
    data = zoo.make("cnn").data
    job = make_job("cnn", eval_data=data[:21], metrics={"accuracy": accuracy})
    async with devices(3) as household:
        await household.holder_run(job).run()
    evals = [event for event in household.events if isinstance(event, Eval)]
    assert [event.step for event in evals] == [3, 6]
    job.model.eval()
    inputs = torch.stack([x for x, _ in data[:21]])
    targets = torch.stack([y for _, y in data[:21]])
    with torch.no_grad():
        output = job.model(inputs)
    assert evals[-1].metrics["accuracy"] == pytest.approx(accuracy(output, targets).item())
    assert evals[-1].metrics["loss"] == pytest.approx(cross_entropy(output, targets).item())


async def test_a_metric_that_fails_is_named() -> None:
    data = zoo.make("mlp").data
    job = make_job(eval_data=data, metrics={"mine": lambda output, target: output.nonsense})
    async with devices(2) as household:
        with pytest.raises(ScriptError, match=r"'mine' failed: .*test_job_life.py:\d+"):
            await household.holder_run(job).run()


@pytest.mark.parametrize("other_devices", [1, 3])
async def test_a_resumed_job_continues_its_curve_on_another_number_of_devices(
    tmp_path: Path, other_devices: int
) -> None:
    def options(count: int, **more: object) -> TrainOptions:
        return TrainOptions(wait_for=count, planner="pp", **more)  # type: ignore[arg-type]

    wanted = undisturbed(make_job("cnn"), 6)
    async with devices(2) as household:
        first = options(2, steps=4, checkpoint=tmp_path / "kept", checkpoint_every=2)
        await household.holder_run(make_job("cnn"), first).run()
        begun = household.losses
    resumed = make_job("cnn")
    async with devices(other_devices) as household:
        second = options(other_devices, resume=tmp_path / "kept")
        await household.holder_run(resumed, second).run()
        assert begun + household.losses == wanted.losses
        assert steps_of(household) == [5, 6]
        done = household.events[-1]
        assert isinstance(done, Done)
        assert (done.steps, done.steps_before) == (6, 4)
    assert_same_weights(resumed, wanted)


@pytest.mark.parametrize("cut_off", [True, False])
async def test_an_evaluation_that_was_cut_off_is_made_when_the_job_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: bool
) -> None:
    """And one that was reported is not reported again."""
    finish = TrainingLoop._finish_evaluation

    async def interrupted(rounds: TrainingLoop, order: RoundOrder, *, is_last: bool) -> None:
        if cut_off and order.round.step == 6:
            assert rounds._checkpointer is not None
            await rounds._checkpointer.idle()
            raise TrainingError("the power goes")
        await finish(rounds, order, is_last=is_last)

    def job() -> Job:
        return make_job("cnn", eval_data=zoo.make("cnn").data)

    def evaluated() -> list[int]:
        return [event.step for event in household.events if isinstance(event, Eval)]

    options = TrainOptions(checkpoint=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_evaluation", interrupted)
        async with devices(1) as household:
            with suppress(TrainingError):
                await household.holder_run(job(), options).run()
            assert evaluated() == ([3] if cut_off else [3, 6])
    assert checkpoint_files.load(tmp_path, pytest.fail).progress.step == 6
    async with devices(1) as household:
        await household.holder_run(job(), TrainOptions(resume=tmp_path)).run()
        assert evaluated() == ([6] if cut_off else [])


async def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    async with devices(1) as household:
        keep = TrainOptions(steps=1, checkpoint=tmp_path)
        await household.holder_run(make_job(), keep).run()
        resume = TrainOptions(resume=tmp_path)
        with pytest.raises(OptionError, match="its seed differs"):
            await household.holder_run(make_job(seed=5), resume).run()
        with pytest.raises(OptionError, match="its model differs"):
            await household.holder_run(make_job("cnn"), resume).run()


async def test_a_checkpoint_beyond_the_end_is_refused_and_one_at_the_end_is_kept(
    tmp_path: Path,
) -> None:
    async with devices(1) as household:
        keep = TrainOptions(steps=4, checkpoint=tmp_path, checkpoint_every=1)
        await household.holder_run(make_job(), keep).run()
        with pytest.raises(OptionError, match="is of step 4, and this training ends at step 2"):
            await household.holder_run(make_job(), TrainOptions(steps=2, resume=tmp_path)).run()
        again = make_job()
        await household.holder_run(again, TrainOptions(steps=4, resume=tmp_path)).run()
        assert len(household.losses) == 4
    assert_same_weights(again, undisturbed(make_job(), 4))


@pytest.mark.parametrize("micro_batch", [1, 5])
async def test_one_sample_is_refused_where_batchnorm_refuses_it(micro_batch: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8))
    job = make_job(model=model, micro_batch=micro_batch)
    async with devices(1) as household:
        with pytest.raises(CaptureError, match="a micro-batch of one sample"):
            await household.holder_run(job).run()
        await household.holder_run(make_job(model=model, micro_batch=4)).run()
    assert model[1].running_var.isfinite().all()


async def test_a_full_disk_warns_trains_on_and_fails_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: object) -> str:
        raise OSError(28, "No space left on device")

    async with devices(2) as household:
        options = TrainOptions(wait_for=2, planner="pp", checkpoint=tmp_path / "c", steps=3)
        await household.holder_run(make_job(), options).run()
        for module in (checkpoint_files, weights_files):
            monkeypatch.setattr(module, "write_tensors", full)
        again = dataclasses.replace(options, steps=6, out=tmp_path / "weights.safetensors")
        with pytest.raises(TrainingError, match="No space left on device"):
            await household.holder_run(make_job(), again).run()
    assert any(isinstance(event, events.Warning) for event in household.events)
    assert len(household.losses) == 9
    assert checkpoint_files.load(tmp_path / "c", pytest.fail).progress.step == 3
    assert not list((tmp_path / "c").glob(".*.partial"))


@pytest.mark.parametrize("for_good", [False, True])
async def test_a_last_checkpoint_that_a_broken_link_left_out_is_made_up_for_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    gather, asked = HolderGeneration.gather, 0

    async def broken(generation: HolderGeneration, *how: Any) -> dict[str, torch.Tensor]:
        nonlocal asked
        asked += 1
        if for_good or asked == 1:
            raise PeerError("there is no link to b")
        return await gather(generation, *how)

    monkeypatch.setattr(HolderGeneration, "gather", broken)
    options = TrainOptions(
        wait_for=2, planner="pp", steps=3, checkpoint=tmp_path / "c", out=tmp_path / "w.safetensors"
    )
    async with devices(2) as household:
        run = household.holder_run(make_job(), options)
        if for_good:
            with pytest.raises(TrainingError, match="no checkpoint of step 3, the last one: there"):
                await run.run()
        else:
            await run.run()
    warned = [event for event in household.events if isinstance(event, events.Warning)]
    assert bool(warned) is for_good
    assert isinstance(household.events[-1], events.Warning if for_good else Done)
    assert (tmp_path / "w.safetensors").exists()
    if not for_good:
        resumed, wanted = make_job(), undisturbed(make_job(), 6)
        async with devices(1) as household:
            again = TrainOptions(resume=tmp_path / "c")
            await household.holder_run(resumed, again).run()
            assert household.losses == wanted.losses[3:]
        assert_same_weights(resumed, wanted)


async def test_a_cancelled_job_frees_the_others() -> None:
    async with devices(2) as household:
        started = asyncio.Event()
        run = household.holder_run(
            make_job(epochs=500), listener=on_step(household, 2, started.set)
        )
        running = asyncio.create_task(run.run())
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await household.until_idle("b")
        await household.holder_run(make_job(epochs=1)).run()  # and they are ready again


async def test_a_device_with_a_part_in_a_job_refuses_a_job_of_its_own() -> None:
    """And the first one goes on undisturbed."""
    async with devices(2) as household:
        refused: list[asyncio.Task[None]] = []
        other = LocalJob(household.members["b"], make_job(), TrainOptions(), lambda _: None)
        begin = on_step(household, 1, lambda: refused.append(asyncio.create_task(other.run())))
        await household.holder_run(make_job(), listener=begin).run()
        assert len(household.losses) == 6
        with pytest.raises(OptionError, match="computing for a's training: wait"):
            await refused[0]


async def test_a_loss_that_is_not_finite_stops_with_its_step_and_unit() -> None:
    job = job_that_ends_in_nan(micro_batch=4)
    async with devices(3) as household:
        where = 'nan at step 1. The first NaN or infinity came from layer "[12]"'
        with pytest.raises(TrainingError, match=where):
            await household.holder_run(job).run()
        await household.until_idle("b")


async def test_weights_that_an_update_broke_are_blamed_on_the_update() -> None:
    job = make_job("cnn", optimizer=SGD(lr=1e30))
    async with devices(2) as household:
        with pytest.raises(
            TrainingError, match=r"at step \d+\. The first NaN or infinity came from"
        ):
            await household.holder_run(job).run()


async def test_a_model_larger_than_all_memory_is_refused_with_the_numbers() -> None:
    async with devices(2, memory_bytes=1000) as household:
        with pytest.raises(PlanError, match=r"may use 1 kB of memory.* missing"):
            await household.holder_run(make_job()).run()


async def test_private_keeps_both_ends_on_the_holder() -> None:
    options = TrainOptions(wait_for=3, planner="pp", private=True)
    job = make_job("cnn", epochs=1)
    async with devices(3) as household:
        await household.holder_run(job, options).run()
        stages = household.plan.stages
        assert stages[0].devices[0].name == stages[-1].devices[0].name == "a"
        assert {stage.devices[0].name for stage in stages[1:-1]} == {"b", "c"}
        assert household.losses == undisturbed(make_job("cnn"), 3).losses


@pytest.mark.parametrize("count", [1, 3])
async def test_a_private_model_of_which_nothing_may_leave_stays_on_the_holder(count: int) -> None:
    def job() -> Job:
        torch.manual_seed(1)
        return make_job(model=torch.nn.Sequential(torch.nn.Linear(12, 10)))

    async with devices(count) as household:
        options = TrainOptions(wait_for=count, private=True)
        await household.holder_run(job(), options).run()
        assert [[d.name for d in stage.devices] for stage in household.plan.stages] == [["a"]]
        assert household.losses == undisturbed(job(), 6).losses


async def test_done_says_what_was_reached_and_where_the_weights_are(tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    async with devices(2) as household:
        options = TrainOptions(wait_for=2, planner="pp", out=out)
        await household.holder_run(make_job(), options).run()
    done = household.events[-1]
    assert isinstance(done, Done)
    assert (done.steps, done.out) == (6, str(out))
    assert out.stat().st_size > 0


async def test_a_place_where_no_weights_can_be_written_is_refused_before_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    async with devices(1) as household:
        for out in (tmp_path, tmp_path / "file" / "w.safetensors"):
            with pytest.raises(OptionError, match="the weights cannot be written to"):
                await household.holder_run(make_job(), TrainOptions(out=out)).run()
        assert not steps_of(household)
    assert os.listdir(tmp_path) == ["file"]


async def test_the_event_loop_does_not_wait_for_a_slow_metric() -> None:
    """Else the others take this device for dead."""
    loop = asyncio.get_running_loop()
    heard = threading.Event()

    def waits(output: object, target: object) -> bool:
        loop.call_soon_threadsafe(heard.set)
        return heard.wait(2)

    job = make_job(epochs=1)
    job = dataclasses.replace(job, eval_data=job.data, metrics={"heard": waits, 3: waits})
    async with devices(1) as household:
        await household.holder_run(job).run()
    (evaluated,) = [event for event in household.events if isinstance(event, Eval)]
    assert evaluated.metrics["heard"] == 1.0


class _ExtraState(torch.nn.Sequential):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Nothing to do."""


async def test_what_a_module_keeps_besides_tensors_is_no_weight(tmp_path: Path) -> None:
    job = make_job()
    job = dataclasses.replace(job, model=_ExtraState(*job.model.children()))
    out = tmp_path / "w.safetensors"
    async with devices(1) as household:
        await household.holder_run(job, TrainOptions(out=out)).run()
    assert isinstance(household.events[-1], Done)
    assert load_file(out).keys() == {name for name, _ in job.model.named_parameters()}


async def test_a_holder_that_is_suspected_as_it_asks_is_waited_for() -> None:
    async with devices(2) as household:
        household.mesh.elect("b")
        plan = household.members["b"].routes[PLAN]

        async def suspect_first(peer: str, message: Message) -> Message | None:
            household.mesh.suspect("a")
            asyncio.get_running_loop().call_soon(household.mesh.refute, "a")
            return await plan.handler(peer, message)

        household.mesh["b"].route(PLAN, suspect_first, plan.parts)
        await household.holder_run(make_job(epochs=1)).run()
        assert {device.name for stage in household.plan.stages for device in stage.devices} == {
            "a",
            "b",
        }


async def test_a_job_whose_device_was_taken_by_another_says_so_and_comes_after_it() -> None:
    """It waits for a third device; meanwhile another job begins that needs two."""
    async with devices(2) as household:
        told: list[Event] = []
        warned = asyncio.Event()

        def listen(event: Event) -> None:
            told.append(event)
            if isinstance(event, events.Warning):
                warned.set()

        options = TrainOptions(wait_for=3, planner="dp", steps=2)
        second = LocalJob(household.members["b"], make_job(), options, listen)
        waiting = asyncio.create_task(second.run())
        trains = asyncio.Event()
        options = TrainOptions(wait_for=2, planner="dp")
        first = asyncio.create_task(
            household.holder_run(
                make_job(epochs=5000), options, on_step(household, 1, trains.set)
            ).run()
        )
        await trains.wait()
        await household.mesh.join("c")
        household.start("c")
        await warned.wait()
        assert [event.message for event in told if isinstance(event, events.Warning)] == [
            "this job waits, and asks again: the device with the data does not answer: "
            "b already computes for another training, that of a"
        ]
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await waiting
        assert isinstance(told[-1], Done)
        assert len([event for event in told if isinstance(event, events.Warning)]) == 1
