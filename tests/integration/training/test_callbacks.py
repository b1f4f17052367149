"""Callbacks on three devices: what they see, how they end a job, and that nothing waits for them
longer than they take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import p2ptrain
from p2ptrain import events, failpoints
from p2ptrain.events import Done, Eval, Event, Plan, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import (
    assert_same_weights,
    make_job,
    momentum_job,
    one_stage_each,
    steps_of,
    undisturbed,
)
from tests.integration.training.test_recovery_holder import Process, again, killed


class Probe:
    """Notes every call, and does something at some."""

    def __init__(self, at: Callable[[Event], object] = lambda event: None) -> None:
        self.seen: list[tuple[str, Event]] = []
        self.threads: set[int] = set()
        self._at = at

    def _note(self, hook: str, event: Event) -> None:
        self.seen.append((hook, event))
        self.threads.add(threading.get_ident())
        self._at(event)

    def on_start(self, event: Event) -> None:
        self._note("on_start", event)

    def on_step(self, event: Event) -> None:
        self._note("on_step", event)

    def on_eval(self, event: Event) -> None:
        self._note("on_eval", event)

    def on_end(self, event: Event) -> None:
        self._note("on_end", event)

    def of(self, hook: str) -> list[Event]:
        return [event for name, event in self.seen if name == hook]


def evaluated(*callbacks: Any, **changes: Any) -> Job:
    """Three updates an epoch, each followed by an evaluation."""
    job = make_job(**changes)
    metrics = {"accuracy": lambda output, y: (output.argmax(1) == y).float().mean()}
    return make_job(
        eval_data=list(job.data)[:8], metrics=metrics, callbacks=list(callbacks), **changes
    )


async def run(job: Job, count: int = 3, options: TrainOptions | None = None) -> Devices:
    async with devices(count) as household:
        await household.holder_run(job, options or one_stage_each(count, 1000)).run()
        return household


def stops_at(step: int) -> Callable[[Event], None]:
    def at(event: Event) -> None:
        if isinstance(event, Step) and event.step == step:
            raise p2ptrain.StopTraining

    return at


async def test_callbacks_see_everything_once_and_in_order_in_one_thread() -> None:
    heard: list[Event] = []
    probe = Probe()
    household = await run(evaluated(probe, heard.append))
    assert [hook for hook, _ in probe.seen] == [
        *("on_start", "on_step", "on_step", "on_step", "on_eval"),
        *("on_step", "on_step", "on_step", "on_eval", "on_end"),
    ]
    assert [event for _, event in probe.seen if isinstance(event, Step | Eval)] == [
        event for event in household.events if isinstance(event, Step | Eval)
    ]
    assert heard == household.events
    assert isinstance(probe.of("on_start")[0], Plan)
    assert probe.of("on_end") == [household.events[-1]]
    assert len(probe.threads) == 1
    assert threading.get_ident() not in probe.threads


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("step", [1, 4, 6])
async def test_a_stop_leaves_the_weights_of_that_step(
    count: int, step: int, tmp_path: Path
) -> None:
    out = tmp_path / "weights.safetensors"
    job = evaluated(probe := Probe(stops_at(step)))
    how: dict[str, Any] = {"local": True} if count == 1 else {"wait_for": count, "planner": "pp"}
    options = TrainOptions(**how, out=out)
    household = await run(job, count, options)
    wanted = undisturbed(evaluated(), step)
    assert household.losses == wanted.losses
    assert_same_weights(job, wanted)
    done = household.events[-1]
    assert isinstance(done, Done)
    assert (done.steps, done.out) == (step, str(out))
    assert torch.equal(load_file(out)["0.weight"], job.model.state_dict()["0.weight"])
    assert [event.step for event in probe.of("on_step")] == list(range(1, step + 1))  # type: ignore[attr-defined]
    evaluations = [event.step for event in household.events if isinstance(event, Eval)]
    assert evaluations == [*range(3, step, 3), step]


async def test_a_stop_after_an_evaluation() -> None:
    def at(event: Event) -> None:
        if isinstance(event, Eval):
            raise p2ptrain.StopTraining

    job = evaluated(Probe(at))
    household = await run(job)
    assert steps_of(household) == [1, 2, 3]
    assert_same_weights(job, undisturbed(evaluated(), 3))


async def test_a_stop_without_barriers_ends_with_the_updates_made() -> None:
    job = momentum_job()
    stopping = Job(**{**_fields(job), "callbacks": [Probe(stops_at(4))]})
    options = TrainOptions(wait_for=3, planner="pp", mode="async")
    household = await run(stopping, 3, options)
    done = household.events[-1]
    assert isinstance(done, Done)
    assert 4 <= done.steps < 12
    assert steps_of(household) == list(range(1, done.steps + 1))


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__dataclass_fields__}


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_eval", "on_end"])
async def test_what_a_callback_raises_ends_the_job_with_that_error(hook: str) -> None:
    class Broken(Exception):
        pass

    def broken(event: Event) -> None:
        raise Broken("no such file")

    failing = type("Logger", (), {hook: staticmethod(broken)})()
    probe = Probe()
    async with devices(3) as household:
        with pytest.raises(Broken, match="no such file") as raised:
            await household.holder_run(evaluated(failing, probe), one_stage_each(3, 99)).run()
    assert any(f"Logger.{hook}" in note or "broken" in note for note in raised.value.__notes__)
    (end,) = probe.of("on_end")
    assert isinstance(end, Done if hook == "on_end" else events.Error)


async def test_the_same_failure_at_the_end_is_not_said_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(event: Event) -> None:
        raise KeyError("oops")

    async with devices(1) as household:
        with pytest.raises(KeyError, match="oops"):
            await household.holder_run(evaluated(broken), one_stage_each(1, 99)).run()
    assert not [r for r in caplog.records if r.name.endswith("callback_runner")]


async def test_errors_of_the_network_that_a_callback_raises_end_the_job_too() -> None:
    def at(event: Event) -> None:
        if isinstance(event, Step):
            raise TimeoutError("the dashboard does not answer")

    async with devices(2) as household:
        with pytest.raises(TimeoutError, match="dashboard"):
            await household.holder_run(evaluated(Probe(at)), one_stage_each(2, 99)).run()


async def test_a_callback_that_blocks_delays_no_other_device_and_is_no_stall() -> None:
    """The loop goes on, and the pipeline after it."""
    loop, blocked, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def at(event: Event) -> None:
        if isinstance(event, Step) and event.step == 2:
            loop.call_soon_threadsafe(blocked.set)
            assert go.wait(30)

    job = evaluated(Probe(at))
    async with devices(3) as household:
        running = asyncio.create_task(household.holder_run(job, one_stage_each(3, 99)).run())
        await blocked.wait()
        for _ in range(20):  # each a turn of the event loop, which does not stand still
            await asyncio.sleep(0.01)
        assert steps_of(household) == [1, 2]  # the next does not count yet
        go.set()
        await running
    assert steps_of(household) == list(range(1, 7))
    assert_same_weights(job, undisturbed(evaluated()))


async def test_the_best_weights_are_written_and_patience_ends_the_training(tmp_path: Path) -> None:
    best = tmp_path / "best.safetensors"
    saving = p2ptrain.SaveBest("loss", best)
    stopping = p2ptrain.EarlyStopping("loss", patience=2, mode="max")  # it falls: never better
    job = evaluated(saving, stopping, epochs=9)
    household = await run(job)
    losses = [e.metrics["loss"] for e in household.events if isinstance(e, Eval)]
    assert len(losses) == 3
    assert stopping.stopped_step == 9
    assert saving.best == min(losses)
    step = 3 * (losses.index(min(losses)) + 1)
    wanted = undisturbed(evaluated(epochs=9), step).state_dict
    written = load_file(best)
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


async def test_a_stop_survives_the_death_of_a_device_after_it() -> None:
    """Who goes on ends with the same step."""
    job = evaluated(epochs=4)
    async with devices(3) as household:

        def at(event: Event) -> None:
            if isinstance(event, Step) and event.step == 5:
                asyncio.run_coroutine_threadsafe(household.mesh.kill("c"), loop).result(30)
                raise p2ptrain.StopTraining

        loop = asyncio.get_running_loop()
        stopping = Job(**{**_fields(job), "callbacks": [Probe(at)]})
        await household.holder_run(stopping, one_stage_each(3, 99)).run()
    assert steps_of(household) == [1, 2, 3, 4, 5]
    assert_same_weights(stopping, undisturbed(evaluated(epochs=4), 5))


async def test_steps_come_once_across_a_restart_of_the_holder(tmp_path: Path) -> None:
    """A second process sees the steps after those that the first one has seen."""
    second = Probe()
    async with devices(3) as household:
        process = await killed(household, tmp_path, 4, evaluated(epochs=4))
        await household.restart("a", process.left)
        goes_on = evaluated(second, epochs=4)
        await household.holder_run(goes_on, one_stage_each(3), None, process.left).run()
    assert [event.step for event in second.of("on_step")] == list(range(5, 13))  # type: ignore[attr-defined]
    assert len(second.of("on_start")) == 1
    assert_same_weights(goes_on, undisturbed(evaluated(epochs=4)))


async def test_a_stop_survives_a_restart_of_the_holder(tmp_path: Path) -> None:
    """It dies while the weights come home: the next process brings them, and trains no further."""
    second = Probe()
    async with devices(3) as household:
        stopping = evaluated(Probe(stops_at(5)), epochs=4)
        process = Process(household, tmp_path, stopping, one_stage_each(3, 99))
        process.at("home.between")
        await process.ended()
        failpoints.disarm()
        goes_on = evaluated(second, epochs=4)
        await again(household, process, goes_on, one_stage_each(3, 99))
    assert steps_of(household) == [1, 2, 3, 4, 5]
    assert [hook for hook, _ in second.seen] == ["on_start", "on_end"]
    assert_same_weights(goes_on, undisturbed(evaluated(epochs=4), 5))


async def test_a_holder_that_is_started_again_keeps_the_best_and_goes_on_waiting(
    tmp_path: Path,
) -> None:
    """The third evaluation without a better value ends it, though the first two were before."""

    def callbacks() -> list[Any]:
        best = p2ptrain.SaveBest("loss", tmp_path / "best.safetensors", mode="max")
        return [best, p2ptrain.EarlyStopping("loss", patience=3, mode="max")]  # it falls

    async with devices(3) as household:
        job = evaluated(*callbacks(), epochs=9)
        process = await killed(household, tmp_path, 10, job, one_stage_each(3, 27))
        await household.restart("a", process.left)
        goes_on = evaluated(*callbacks(), epochs=9)
        options = one_stage_each(3, 27)
        await household.holder_run(goes_on, options, None, process.left).run()
    best, stopping = goes_on.callbacks
    assert (best.best_step, stopping.stopped_step) == (3, 12)
    wanted = undisturbed(evaluated(epochs=9), 3).state_dict
    written = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


async def test_a_file_that_cannot_be_written_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, and no folder")
    best = p2ptrain.SaveBest("loss", tmp_path / "taken" / "best.safetensors")
    async with devices(1) as household:
        with pytest.raises(p2ptrain.OptionError, match="cannot be written to"):
            await household.holder_run(evaluated(best), TrainOptions(local=True)).run()
    assert not steps_of(household)
