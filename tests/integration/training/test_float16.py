"""A job in float16 trains what plain torch trains with its GradScaler, to the bit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import p2ptrain
from p2ptrain import events
from p2ptrain.errors import OptionError, TrainingError
from p2ptrain.events import Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import AdamW
from tests.integration.training.group_plans import dealt, device_count, divided, force
from tests.integration.training.household import OFTEN_COPIED, Devices, devices
from tests.integration.training.jobs import on_step
from tests.integration.training.test_recovery_holder import again, killed
from tests.integration.training.test_weight_average import Normalising, samples
from tests.support.twin_device import TwinDevice

STEPS, DECAY = 12, 0.9

LOUD = 20.0
"""So large a loss that the first scales are too large for its gradients, and later ones not."""


def loud(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target) * LOUD


def job(**changes: Any) -> Job:
    settings: dict[str, Any] = {"batch_size": 8, "micro_batch": 4, "epochs": 4, "ema": DECAY}
    settings |= {"clip_grad_norm": 1.0, "autocast": torch.float16}
    settings |= {"schedule": lambda update: 0.9**update, **changes}
    return Job(
        settings.pop("model", Normalising()),
        samples(),
        settings.pop("loss", loud),
        AdamW(lr=0.05),
        **settings,
    )


@dataclass(frozen=True)
class Plain:
    losses: list[float]
    scales: list[float]
    state: dict[str, Tensor]
    averages: dict[str, Tensor]


def whole_samples() -> nn.Module:
    """One that looks at each sample by itself."""
    model = Normalising()
    model.norm = nn.LayerNorm(6)  # type: ignore[assignment]
    return model


def plain(model: nn.Module | None = None) -> Plain:
    """The usual loop: unscale, clip, step, update, and the schedule goes on in any case."""
    model, data = (model or Normalising()).train(), samples()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.9**update)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    scaler = torch.amp.GradScaler("cpu")
    losses, scales = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step // 3)
        order = torch.randperm(len(data), generator=generator).split(8)[step % 3]
        total = 0.0
        for piece in order.split(4):
            x, y = (torch.stack([data[k][side] for k in piece]) for side in (0, 1))
            with torch.autocast("cpu", torch.float16):
                loss = loud(model(x), y)
            scaler.scale(loss * 0.5).backward()
            total += loss.item() * 0.5
        scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
        losses.append(total)
    averages = average.module.state_dict()
    return Plain(losses, scales, model.state_dict(), averages)


def scales_of(household: Devices) -> list[float | None]:
    return [event.scale for event in household.events if isinstance(event, Step)]


def assert_plain(household: Devices, made: Job) -> None:
    wanted, found = plain(), made.model.state_dict()
    assert len({*wanted.scales[:6]}) > 3, "none is skipped"
    assert wanted.scales[-1] == wanted.scales[-2], "all are skipped"
    assert scales_of(household) == wanted.scales
    assert household.losses == wanted.losses
    assert [name for name in found if not torch.equal(found[name], wanted.state[name])] == []


@pytest.mark.parametrize(("count", "twins"), [(1, ""), (2, "b"), (3, "")])
async def test_the_curve_is_that_of_plain_torch_with_a_scaler(count: int, twins: str) -> None:
    made = job()
    how: dict[str, Any] = {"local": True} if count == 1 else {"wait_for": count, "planner": "pp"}
    compute = {name: TwinDevice(seed=1) for name in twins}
    async with devices(count, compute=compute) as household:
        await household.holder_run(made, TrainOptions(**how)).run()
    assert_plain(household, made)
    assert not [event for event in household.events if isinstance(event, events.Warning)]


async def test_the_average_goes_on_in_updates_that_are_skipped(tmp_path: Path) -> None:
    made, out = job(), tmp_path / "weights.safetensors"
    async with devices(2) as household:
        await household.holder_run(made, TrainOptions(2, planner="pp", out=out)).run()
    found, wanted = load_file(tmp_path / "weights.ema.safetensors"), plain().averages
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("twins", ["", "b"])
@pytest.mark.parametrize("plan", [[divided(2, 2)], [dealt(1, 1), divided(4)]], ids=str)
async def test_a_group_decides_together(
    monkeypatch: pytest.MonkeyPatch, plan: Any, twins: str
) -> None:
    force(monkeypatch, plan)
    made, count = job(model=whole_samples()), device_count(plan)
    async with devices(count, compute={name: TwinDevice() for name in twins}) as household:
        await household.holder_run(made, TrainOptions(wait_for=count)).run()
    wanted = plain(whole_samples())
    found = [scale or 0.0 for scale in scales_of(household)]
    assert found[:4] == wanted.scales[:4]
    # half of a micro-batch has smaller sums in float16 than all of it
    assert all(scale in (one, 2 * one) for scale, one in zip(found, wanted.scales, strict=True))
    assert household.losses == pytest.approx(wanted.losses, rel=0.1)


@pytest.mark.parametrize("step", [2, 9])
async def test_a_death_does_not_change_it(step: int) -> None:
    """While updates are skipped, and after."""
    made, killing = job(), []
    async with devices(3, settings=OFTEN_COPIED) as household:

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill("c")))

        how = TrainOptions(wait_for=3, planner="pp")
        await household.holder_run(made, how, on_step(household, step, kill)).run()
        await asyncio.gather(*killing)
    assert any(isinstance(event, events.Recovered) for event in household.events)
    assert_plain(household, made)


@pytest.mark.parametrize("step", [3, 9])
async def test_a_killed_holder_knows_the_scale(tmp_path: Path, step: int) -> None:
    made, how = job(), TrainOptions(wait_for=3, planner="pp")
    async with devices(3) as household:
        process = await killed(household, tmp_path, step, job(), how)
        await household.until_waiting("b", "c")
        await again(household, process, made, how)
    assert_plain(household, made)


@pytest.mark.parametrize("step", [2, 8])
async def test_a_checkpoint_has_the_scale(tmp_path: Path, step: int) -> None:
    made = job()
    first = TrainOptions(wait_for=2, planner="pp", steps=step, checkpoint=tmp_path)
    async with devices(2) as household:
        await household.holder_run(job(), first).run()
    before = household.events
    async with devices(2) as household:
        await household.holder_run(made, replace(first, steps=None, resume=tmp_path)).run()
    household.events[:0] = before
    assert_plain(household, made)


async def test_a_resumed_job_that_is_killed_knows_it_too(tmp_path: Path) -> None:
    """Before the scale has changed again."""
    first = TrainOptions(wait_for=2, planner="pp", steps=8, checkpoint=tmp_path / "kept")
    async with devices(2) as household:
        await household.holder_run(job(), first).run()
    before, made = household.events, job()
    resuming = replace(first, steps=None, checkpoint=None, resume=tmp_path / "kept")
    async with devices(2) as household:
        process = await killed(household, tmp_path, 10, job(), resuming)
        await household.until_waiting("b")
        await again(household, process, made, resuming)
    household.events[:0] = before
    assert_plain(household, made)


async def test_what_is_infinite_at_any_scale_ends_the_job() -> None:
    """With the layer's name, and one warning on the way."""

    def broken(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + (output.sum() * 0).abs().sqrt()

    made = job(loss=broken, epochs=40, clip_grad_norm=None)
    async with devices(2) as household:
        with pytest.raises(TrainingError, match=r"step 31.*a loss scale of 6\.1e-05"):
            await household.holder_run(made, TrainOptions(2, planner="pp")).run()
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert len([message for message in told if "were skipped" in message]) == 1


async def test_async_is_refused() -> None:
    how = TrainOptions(2, planner="pp", asynchrony=p2ptrain.AsyncOptions(), mode="async")
    async with devices(2) as household:
        with pytest.raises(OptionError, match="float16 skips an update on all devices"):
            await household.holder_run(job(clip_grad_norm=None), how).run()


def test_what_a_scale_cannot_do_is_refused() -> None:
    with pytest.raises(OptionError, match="leave out skip_nonfinite"):
        job(skip_nonfinite=True)
    with pytest.raises(OptionError, match="is in float16"):
        job(model=Normalising().half())
