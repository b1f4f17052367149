"""Groups of devices carry out what plain torch would, and their replicas stay the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from p2ptrain import events, failpoints
from p2ptrain.errors import TrainingError
from p2ptrain.events import Eval, Event, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from p2ptrain.worker.hosted_stages import HostedStages
from tests.integration.training.group_plans import Stage, dealt, device_count, divided, force
from tests.integration.training.household import Devices, devices
from tests.integration.training.replicas import check_replicas, engaged
from tests.support import reference, zoo
from tests.support.curves import Case, difference, job_of, outcome_of, plain_torch
from tests.support.memory_household import memory_id
from tests.support.reference import Outcome

TOLERANCE = 1e-8
PLANS: Sequence[Sequence[Stage]] = [
    [divided(3, 1)],
    [dealt(3, 1)],
    [divided(2, 1, 1)],
    [divided(4), divided(2, 2)],
    [divided(3, 1), divided(4)],
    [divided(3, 1), divided(2, 2)],
    [dealt(2, 2), divided(4)],
    [divided(4), dealt(1, 2, 1)],
    [dealt(3, 1), dealt(2, 2)],
    [dealt(2, 2), divided(1, 3), divided(4)],
]


def _named(plan: Sequence[Stage]) -> str:
    return " ".join(f"{'d' if s.allocation == 'micro_batches' else 's'}{s.shares}" for s in plan)


async def _trained(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage], case: Case
) -> tuple[Outcome, Devices]:
    """Train on a household that follows `plan`; replicas are compared after the last update."""
    force(monkeypatch, plan)
    made = zoo.make(case.model, dtype=case.dtype)
    trained: list[HostedStages] = []
    async with devices(device_count(plan)) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == case.steps:
                trained.extend(engaged(household))

        options = TrainOptions(wait_for=case.devices, steps=case.steps)
        await household.holder_run(job_of(case, made), options, listen).run()
    check_replicas(trained, case.steps)
    return outcome_of(household.losses, made), household


def _check_plain_torchs(outcome: Outcome, case: Case) -> None:
    """Losses and trained weights."""
    found = difference(outcome, plain_torch(case))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE


@pytest.mark.parametrize("plan", PLANS, ids=_named)
async def test_any_plan_trains_as_plain_torch(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage]
) -> None:
    case = Case("mlp", devices=device_count(plan), steps=5, dtype=torch.float64)
    outcome, _ = await _trained(monkeypatch, plan, case)
    _check_plain_torchs(outcome, case)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        *(([dealt(3, 1)], model) for model in ("unet", "frozen", "custom_loss")),
        *(([divided(4), dealt(2, 2)], model) for model in ("cnn", "gpt")),
        *(([dealt(2, 2), dealt(1, 3)], model) for model in ("residual", "gpt")),
    ],
)
async def test_whole_micro_batches_are_exact_for_any_model(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage], model: str
) -> None:
    """BatchNorm's statistics, running ones included, and tied weights too."""
    case = Case(model, devices=device_count(plan), steps=4, dtype=torch.float64)
    outcome, _ = await _trained(monkeypatch, plan, case)
    _check_plain_torchs(outcome, case)


_JOBS: Sequence[dict[str, Any]] = [
    {"batch_size": 14},
    {"clip_grad_norm": 0.3},
    {"optimizer": AdamW(lr=0.01, weight_decay=0.1), "model": "gpt", "clip_grad_norm": 0.5},
    {"model": "named_inputs", "decay": 0.8},
]


@pytest.mark.parametrize(
    ("plan", "changed"),
    [
        *(([divided(2, 1, 1), divided(4)], _JOBS[k]) for k in (0, 2, 3)),
        *(([dealt(2, 1, 1), divided(1, 3)], _JOBS[k]) for k in (0, 1)),
    ],
    ids=str,
)
async def test_whatever_the_job(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage], changed: dict[str, Any]
) -> None:
    """Among them a last micro-batch of two samples, in which not every device has a part."""
    case = Case("mlp", devices=device_count(plan), steps=4, dtype=torch.float64)
    outcome, _ = await _trained(monkeypatch, plan, case := replace(case, **changed))
    _check_plain_torchs(outcome, case)


@pytest.mark.parametrize("plan", [[dealt(2, 2)], [divided(4), dealt(2, 2)]], ids=_named)
async def test_a_round_begins_while_sums_of_the_one_before_travel(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage]
) -> None:
    """A chunk is held until its device has the next round's first piece: else it would hang."""
    case = Case("residual", devices=device_count(plan), steps=6, dtype=torch.float64)
    loop = asyncio.get_running_loop()
    is_there = loop.create_future()
    group = memory_id("abc"[device_count(plan) - 1])
    held: list[int] = []

    def hold(reached: failpoints.Reached) -> asyncio.Future[None]:
        held.append(reached.step)
        return is_there

    def let_go(_reached: failpoints.Reached) -> None:
        is_there.set_result(None)

    failpoints.arm("bucket.send.before", hold, device=group, step=3)
    failpoints.arm("forward.receive.after", let_go, device=group, step=4)
    try:
        outcome, _ = await _trained(monkeypatch, plan, case)
    finally:
        failpoints.disarm()
    assert held == [3]
    _check_plain_torchs(outcome, case)


async def test_where_all_sums_are_waited_for_a_round_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("residual", devices=2, steps=5, dtype=torch.float64)
    for turns in (False, True):
        plan = [replace(dealt(2, 2), turns=turns)]
        outcome, _ = await _trained(monkeypatch, plan, case)
        _check_plain_torchs(outcome, case)


async def test_dropout_is_the_same_when_whole_micro_batches_are_dealt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("dropout", devices=1, steps=4, dtype=torch.float64)
    alone, _ = await _trained(monkeypatch, [divided(4)], case)
    plan = [dealt(3, 1), dealt(2, 2)]
    shared, _ = await _trained(monkeypatch, plan, replace(case, devices=4))
    assert difference(alone, shared).loss < TOLERANCE


async def test_parts_of_a_micro_batch_do_not_share_their_dropout_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ones through dropout on two devices: with one mask for both, both halves would be equal."""
    model = _Weighted(torch.nn.Dropout(0.5))
    data = [(torch.ones(64), torch.zeros(64))] * 24

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean()

    job = Job(model, data, loss, optimizer=SGD(lr=0.0), batch_size=2, micro_batch=2)
    force(monkeypatch, [divided(1, 1)])
    async with devices(2) as household:
        await household.holder_run(job, TrainOptions(wait_for=2)).run()
    left = [round(loss * 64) for loss in household.losses]  # ones, in both rows together
    assert len(left) == 12
    assert any(count % 2 for count in left)


class _Weighted(torch.nn.Module):
    """One weight before another module, so that there is something to train."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Scale, then the rest."""
        result: Tensor = self.inner(x * self.weight)
        return result


@pytest.mark.parametrize(
    "plan", [[divided(3, 1), divided(2, 2)], [dealt(3, 1), dealt(1, 2, 1)]], ids=_named
)
async def test_evaluations_cover_every_sample_once(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage]
) -> None:
    """Also more of them than a training round has micro-batches, and a smaller last one."""
    case = Case("mlp", devices=device_count(plan), steps=2, dtype=torch.float64)
    made = zoo.make("mlp", dtype=torch.float64)
    evaluated = made.data[:27]

    def mean_label(output: Tensor, target: Tensor) -> Tensor:
        assert len(output) == len(target)
        return target.double().mean()

    job = replace(job_of(case, made), eval_data=evaluated, metrics={"label": mean_label})
    force(monkeypatch, plan)
    async with devices(device_count(plan)) as household:
        options = TrainOptions(wait_for=case.devices, steps=case.steps)
        await household.holder_run(job, options).run()
    (told,) = [event for event in household.events if isinstance(event, Eval)]
    inputs, targets = reference.stack(evaluated)
    with torch.no_grad():
        made.model.eval()
        expected = made.loss(reference.call(made.model, inputs), targets).item()
    assert told.metrics["loss"] == pytest.approx(expected, abs=1e-9)
    assert told.metrics["label"] == pytest.approx(targets.double().mean().item())


async def test_targets_left_out_that_come_up_later_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sample that was not looked at before the plan, and a term that no count of it weighs."""

    def both(output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output, target) + output.square().mean()

    data = [(torch.ones(4) * number / 64, 0 if number != 7 else -100) for number in range(64)]
    options = TrainOptions(wait_for=2, steps=16)
    alone = TrainOptions(local=True, steps=16)
    cases = ([divided(2, 2)], 4, options, 1), ([dealt(1, 1)], 4, options, 1), (None, 8, alone, 0)
    for plan, micro_batch, how, warnings in cases:
        if plan is None:
            monkeypatch.undo()
        else:
            force(monkeypatch, plan)
        job = Job(torch.nn.Linear(4, 3), data, both, SGD(lr=0.1), 8, micro_batch, epochs=2)
        async with devices(1 if plan is None else 2) as household:
            await household.holder_run(job, how).run()
            told = [event for event in household.events if isinstance(event, events.Warning)]
        assert ["which the loss leaves out" in event.message for event in told] == [True] * warnings


async def test_a_gradient_that_is_not_finite_on_one_replica_names_device_step_and_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A square root of zero: the loss is finite, its gradient is not."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), _Root(), torch.nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[union-attr]
        model[0].bias.zero_()  # type: ignore[union-attr]
    data = [(torch.ones(4), torch.zeros(1))] * 16
    job = Job(model, data, torch.nn.functional.mse_loss, SGD(lr=0.1), batch_size=8, micro_batch=4)
    force(monkeypatch, [dealt(1, 1)])
    async with devices(2) as household:
        with pytest.raises(TrainingError, match=r"[ab]: .*gradient of 0\.weight \(layer .* step 1"):
            await household.holder_run(job, TrainOptions(wait_for=2)).run()
        await household.until_idle("b")


class _Root(torch.nn.Module):
    """Its gradient at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return torch.sqrt(x)


@pytest.mark.parametrize("plan", [[dealt(1, 1)], [divided(2, 2)], [divided(4), dealt(1, 1)]])
async def test_data_that_is_not_finite_names_the_device_that_got_it(
    monkeypatch: pytest.MonkeyPatch, plan: Sequence[Stage]
) -> None:
    """One value in the batch's last sample, which the last device of a group gets."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    data = [(torch.ones(4), torch.zeros(1))] * 8
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    data[int(order[-1])] = (torch.full((4,), torch.nan), torch.zeros(1))
    job = Job(model, data, torch.nn.functional.mse_loss, SGD(lr=0.1), batch_size=8, micro_batch=4)
    force(monkeypatch, plan)
    words = r"step 1\. The data contain NaN or infinity .*[Ll]ook at"
    async with devices(device_count(plan)) as household:
        with pytest.raises(TrainingError, match=words):
            await household.holder_run(job, TrainOptions(wait_for=device_count(plan))).run()
