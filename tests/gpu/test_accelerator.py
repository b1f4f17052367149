"""What counts of training, on a real accelerator: `make test-gpu`, some minutes.

Everything else is tested on a twin of an accelerator (`tests/support/twin_device.py`), which cannot
show what a real one computes, and when.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from p2ptrain.devices.check import CheckReport, check_device
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.events import Recovered, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.profiling.profile_cache import ProfileCache, measure
from p2ptrain.worker.hosted_stages import HostedStages
from tests.integration.training import test_float16 as float16
from tests.integration.training.household import OFTEN_COPIED, Devices, devices
from tests.integration.training.jobs import (
    STEPS,
    make_job,
    momentum_job,
    on_step,
    one_stage_each,
    undisturbed,
)
from tests.integration.training.made_up import make_up_profiles
from tests.integration.training.replicas import check_replicas, engaged
from tests.integration.training.test_lora import adapted
from tests.support import reference, zoo
from tests.support.curves import Case, job_of, plain_torch
from tests.support.reference import Outcome
from tests.support.twin_device import TwinDevice
from tools.gpu_bench import copies, in_household
from tools.gpu_models import workloads

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

T = TypeVar("T")

TOLERANCE = 2e-4
"""Of a loss after a dozen updates that ran on two kinds of devices: sums in another order."""


async def computed_on(device: ComputeDevice, function: Callable[[], T]) -> T:
    """In a thread as jobs have it."""
    thread = ComputeThread(device=device)
    try:
        return await thread.run((0,), function)
    finally:
        await thread.close()


def plain_torch_on(device: ComputeDevice, job: Job, steps: int) -> Outcome:
    """The contract's loop, with everything in the device's memory."""
    assert isinstance(job.optimizer, OptimizerSpec)
    spec, place = job.optimizer, device.place
    recipe = reference.Recipe(
        optimizer=lambda parameters: spec.build(list(parameters)),
        batch_size=job.batch_size,
        micro_batch=job.micro_batch,
        epochs=job.epochs,
        steps=steps,
        seed=job.seed,
        clip_grad_norm=job.clip_grad_norm,
    )
    data = [(_on(place, x), _on(place, y)) for x, y in job.data]
    for parameter in job.model.parameters():  # `Module.to` unties those of the twin
        swap_tensors(parameter, nn.Parameter(parameter.detach().to(place)))
    found = reference.train(job.model.to(place), data, job.loss, recipe)
    return Outcome(found.losses, {name: tensor.cpu() for name, tensor in found.state_dict.items()})


def _on(place: torch.device, value: object) -> object:
    return torch.as_tensor(value).to(place)


async def trained(job: Job, options: TrainOptions, compute: Mapping[str, ComputeDevice]) -> Devices:
    """Of as many devices as the options wait for; the others compute on their processors."""
    async with devices(options.wait_for, compute=compute) as household:
        await household.holder_run(job, options).run()
    return household


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.05, momentum=0.9), AdamW(lr=0.01)], ids=["sgd", "adamw"]
)
async def test_one_stage_trains_as_plain_torch_on_the_same_card(
    card: ComputeDevice, name: str, optimizer: OptimizerSpec
) -> None:
    """To the bit, where torch has one order of sums; pooling to a size has none backwards."""
    jobs = [make_job(name, optimizer=optimizer, epochs=4, clip_grad_norm=1.0) for _ in range(2)]
    wanted = await computed_on(card, partial(plain_torch_on, card, jobs[0], STEPS))
    alone = TrainOptions(1, planner="single", steps=STEPS)
    household = await trained(jobs[1], alone, {"a": card})
    tolerance = TOLERANCE if name == "cnn" and card is not HOST else 0.0
    assert household.losses == pytest.approx(wanted.losses, rel=tolerance, abs=0.0)
    for tensor, found in jobs[1].model.state_dict().items():
        assert found.device.type == "cpu"
        torch.testing.assert_close(
            found, wanted.state_dict[tensor], rtol=100 * tolerance, atol=10 * tolerance
        )


@pytest.mark.parametrize("name", ["cnn", "gpt"])
async def test_a_pipeline_of_a_card_and_a_processor_computes_the_same_curve(
    card: ComputeDevice, name: str
) -> None:
    """As the processor alone, but for last bits; and every time the same bits."""
    pipeline = one_stage_each(2)
    wanted = undisturbed(make_job(name, epochs=4)).losses
    once, again = [
        (await trained(make_job(name, epochs=4), pipeline, {"b": card})).losses for _ in range(2)
    ]
    assert once == pytest.approx(wanted, rel=TOLERANCE)
    assert once == again


@pytest.mark.parametrize("name", ["cnn", "gpt"])
async def test_a_stage_of_a_card_and_a_processor_has_the_same_weights(
    card: ComputeDevice, name: str
) -> None:
    """To the bit, with the optimizer's state, running statistics and averages."""
    job = make_job(name, optimizer=AdamW(lr=0.01), epochs=4, clip_grad_norm=1.0, ema=0.9)
    group, engaged_then = TrainOptions(2, planner="dp", steps=STEPS), list[HostedStages]()
    async with devices(2, compute={"b": card}) as household:
        listen = on_step(household, STEPS, lambda: engaged_then.extend(engaged(household)))
        await household.holder_run(job, group, listen).run()
    check_replicas(engaged_then, STEPS)
    assert len(engaged_then) == 2
    wanted = undisturbed(make_job(name, optimizer=AdamW(lr=0.01), epochs=4, clip_grad_norm=1.0))
    assert household.losses == pytest.approx(wanted.losses, rel=10 * TOLERANCE)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cnn", {"conv2d": "NaN", "batch norm": "NaN"}),
        ("gpt", {"attention": "NaN", "gelu": "NaN", "embedding": "NaN"}),
    ],
)
async def test_what_is_left_to_the_host_changes_no_curve(
    card: ComputeDevice, name: str, wrong: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every time it is the same bits, where torch has one order of sums."""
    monkeypatch.setattr(card, "wrong", {} if card is HOST else CheckReport(wrong).wrong_operators)
    make_up_profiles(monkeypatch)
    wanted = undisturbed(make_job(name, epochs=4)).losses
    once, again = [
        (await trained(make_job(name, epochs=4), one_stage_each(2), {"b": card})).losses
        for _ in range(2)
    ]
    assert once == pytest.approx(wanted, rel=TOLERANCE)
    assert once == again


@pytest.mark.parametrize("dies", ["b", "c"])
async def test_a_member_dies(card: ComputeDevice, dies: str) -> None:
    """The card's (b), or a processor's beside it."""
    job, wanted = momentum_job(), undisturbed(momentum_job()).losses
    killing: list[asyncio.Task[None]] = []
    async with devices(3, settings=OFTEN_COPIED, compute={"b": card}) as household:

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill(dies)))

        await household.holder_run(job, one_stage_each(3), on_step(household, 5, kill)).run()
        await asyncio.gather(*killing)
        await household.members[dies].close()
    assert household.losses == pytest.approx(wanted, rel=TOLERANCE)
    steps = [event.step for event in household.events if isinstance(event, Step)]
    assert steps == list(range(1, STEPS + 1))
    assert any(isinstance(event, Recovered) for event in household.events)
    left = {device.name for stage in household.plan.stages for device in stage.devices}
    assert dies not in left


async def test_float16_scales_its_loss(card: ComputeDevice) -> None:
    """As on a processor, but for sums in another order, which may decide one skip more or less."""
    job, wanted = float16.job(), float16.plain()
    household = await trained(job, one_stage_each(2, float16.STEPS), {"b": card})
    found = [scale or 0.0 for scale in float16.scales_of(household)]
    assert found[:2] == wanted.scales[:2], "the first updates are skipped"
    assert found[-1] in (wanted.scales[-1] / 2, wanted.scales[-1], 2 * wanted.scales[-1])
    assert household.losses == pytest.approx(wanted.losses, rel=0.1)


async def test_fast_math_is_said_and_near(card: ComputeDevice) -> None:
    job, wanted = replace(momentum_job(), fast_math=True), undisturbed(momentum_job())
    household = await trained(job, one_stage_each(2), {"b": card})
    assert household.losses == pytest.approx(wanted.losses, rel=2e-2)
    said = any("fast_math" in change for change in household.plan.changes_results)
    assert said == (card is not HOST)
    exact = await trained(momentum_job(), one_stage_each(2), {"b": card})
    assert exact.losses == pytest.approx(wanted.losses, rel=TOLERANCE)


async def test_masks_are_the_same_wherever_the_card_is(card: ComputeDevice) -> None:
    case, curves = Case("dropout", devices=2, steps=6), []
    for name in ("a", "b", ""):
        made, chosen = zoo.make(case.model), one_stage_each(2, case.steps)
        household = await trained(job_of(case, made), chosen, {name: card} if name else {})
        curves.append(household.losses)
    assert curves[0] == pytest.approx(curves[1], rel=TOLERANCE)
    if card is not HOST:
        assert curves[2] != pytest.approx(curves[0], rel=TOLERANCE), "processors alone draw others"


async def test_adapters_are_trained(card: ComputeDevice) -> None:
    case = Case("gpt2", devices=2, micro_batch=8, steps=4, optimizer=AdamW(lr=0.01))
    wanted = plain_torch(case, adapted(case.model))
    job = job_of(case, adapted(case.model))
    household = await trained(job, one_stage_each(2, case.steps), {"b": card})
    assert household.losses == pytest.approx(wanted.losses, rel=TOLERANCE)


async def test_a_processor_beside_the_card_in_the_benchmark(
    card: ComputeDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table's last column: who has a part, and what a step takes."""
    if isinstance(card, TwinDevice):
        pytest.skip("processes of their own have no twin")
    chosen = workloads(small=card is HOST)[:1]
    members = in_household(chosen, card.name, 12, tmp_path, float("inf"))
    [(_, seconds, used)] = [found async for found in members]
    assert 0 < seconds < 60
    with capsys.disabled():
        sys.stdout.write(f"\nbeside a processor: {1e3 * seconds:.2f} ms a step, {used}\n")


async def test_a_model_of_the_benchmark_is_measured_and_trained(card: ComputeDevice) -> None:
    (workload,) = [
        one
        for one in workloads(small=card is HOST or isinstance(card, TwinDevice))
        if one.name == "mobilenet"
    ]
    captured = capture(workload.make(), workload.loss, workload.batch(0), evaluation=False)
    thread, sizes = ComputeThread(device=card), [4, 16, workload.batch_size]
    found = await measure(captured.description, sizes, thread, ProfileCache(None), 8 << 30)
    await thread.close()
    sample = [sum(found["times"][size]["forward"]) / int(size) for size in found["times"]]
    assert found["processor"] == card.kind or card is HOST
    if not isinstance(card, TwinDevice):  # whose operators take as long as they have elements
        assert sample[-1] < sample[0], "a sample of a large batch is cheaper"
    alone = TrainOptions(1, planner="single")
    async with devices(1, memory_bytes=None, compute={"a": card}) as household:
        await household.holder_run(workload.job(6), alone).run()
    losses = household.losses
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_units_of_every_kind_compute_right(card: ComputeDevice) -> None:
    if card is HOST:
        pytest.skip("nothing to compare the processor with")
    report = check_device(card)
    assert report.useless is None
    assert not report.failures


def test_what_is_copied_arrives(card: ComputeDevice) -> None:
    """With strides, in both directions, while it computes."""
    card.prepare_thread()
    drawn: list[Tensor] = [torch.randn(64, 128).t(), torch.arange(10), torch.randn(4, 3, 8, 8)]
    drawn[2] = drawn[2].contiguous(memory_format=torch.channels_last)
    inside = card.copied_in(drawn)
    for before, after in zip(drawn, card.fetched(inside), strict=True):
        assert after is not None
        assert torch.equal(before, after)
        assert before.stride() == after.stride()
    assert len(copies(card)) == 2
