"""The heart of it all: a household's loss curve is plain torch's, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.model.stage.optimizer_spec import SGD, Adam, AdamW
from p2ptrain.runtime import stage_sender
from tests.support import zoo
from tests.support.curves import Case, difference, household_run, plain_torch, with_p2ptrain

SMALL = [  # "mlp", "cnn" and "residual" are cut in every way below
    "unet",
    "two_inputs",
    "named_inputs",
    "custom_loss",
    "frozen",
    "frozen_layers",
    "inner_structures",
]


@pytest.mark.parametrize("name", SMALL)
async def test_three_devices_train_bit_for_bit_as_plain_torch(name: str) -> None:
    case = Case(name, devices=3, micro_batch=4, steps=6)
    ours, reference = await with_p2ptrain(case), plain_torch(case)
    assert ours.losses == reference.losses
    assert difference(ours, reference).state == 0.0


@pytest.mark.parametrize(
    "case",
    [
        Case("mlp", devices=1, micro_batch=16, steps=5),
        Case("mlp", devices=2, micro_batch=5, steps=5),  # 5 + 5 + 5 + 1
        Case("mlp", devices=4, micro_batch=2, steps=5, optimizer=Adam(lr=0.01)),
        Case("cnn", devices=2, micro_batch=3, optimizer=AdamW(lr=0.01, weight_decay=0.1), steps=5),
        Case("cnn", devices=4, micro_batch=2, clip_grad_norm=0.5, steps=5),
        Case("residual", devices=2, clip_grad_norm=0.1, decay=0.8, steps=7),
        Case("residual", devices=3, dtype=torch.float64, steps=4),
    ],
    ids=str,
)
async def test_whatever_the_cut_the_optimizer_and_the_schedule(case: Case) -> None:
    ours, reference = await with_p2ptrain(case), plain_torch(case)
    assert ours.losses == reference.losses
    assert difference(ours, reference).state == 0.0


async def test_a_tied_weight_in_two_stages_is_summed_in_plain_torchs_order() -> None:
    """AdamW turns the last bit of a tiny gradient into a whole step: the hardest test."""
    case = Case("gpt", devices=3, optimizer=AdamW(lr=0.01), clip_grad_norm=0.5, steps=8)
    ours, reference = await with_p2ptrain(case), plain_torch(case)
    assert ours.losses == reference.losses
    assert difference(ours, reference).state == 0.0


async def test_two_stages_with_a_tied_weight_on_one_device_clip_it_once_each() -> None:
    """The embedding and the head both stay with the data: the sum goes from one to the other."""
    case = Case("gpt", devices=3, clip_grad_norm=0.1, steps=4, private=True)
    ours, reference = await with_p2ptrain(case), plain_torch(case)
    assert ours.losses == reference.losses
    assert difference(ours, reference).state == 0.0


async def test_a_large_tied_weight_is_summed_stage_by_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the stages' sums are added, in another order than plain torch: float64 is the test."""
    monkeypatch.setattr(stage_sender, "CHAIN_LIMIT_BYTES", 0)
    case = Case("gpt", devices=3, dtype=torch.float64, clip_grad_norm=0.5, steps=10)
    run = await household_run(case, zoo.make(case.model, dtype=case.dtype))
    found = difference(run.outcome, plain_torch(case))
    assert 0.0 < found.loss < 1e-8
    assert found.state < 1e-8
    (change,) = run.changes
    assert change.startswith(f"{min(run.tied)} is used in several stages")


async def test_dropout_does_not_depend_on_the_devices() -> None:
    curves = [
        (await with_p2ptrain(Case("dropout", devices=devices, steps=5))).losses
        for devices in (1, 2, 4)
    ]
    assert curves[0] == curves[1] == curves[2]
    without = plain_torch(Case("mlp", devices=1, steps=5)).losses
    assert curves[0] != without


class _Faint(nn.Module):
    """Adds so little that its own gradients are no normal numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * 1e-30 * 1e-9


def _with_faint_gradients() -> zoo.Made:
    torch.manual_seed(0)
    made = zoo.make("mlp")
    width = made.data[0][0].shape[-1]
    return replace(made, model=nn.Sequential(_Faint(width), made.model))


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush")
async def test_numbers_too_small_to_be_normal_are_zero_and_no_loss_shows_it() -> None:
    """What is not even normal moves no weight but one that is as small."""
    case = Case("mlp", devices=2, micro_batch=4, steps=6)
    ours = (await household_run(case, _with_faint_gradients())).outcome
    reference = plain_torch(case, _with_faint_gradients())
    assert ours.losses == reference.losses
    assert not ours.state_dict["0.inner.bias"].any()
    assert 0.0 < difference(ours, reference).state < torch.finfo(torch.float32).tiny


async def test_another_seed_gives_another_order() -> None:
    one = await with_p2ptrain(Case("mlp", devices=2, steps=3, seed=0))
    other = await with_p2ptrain(Case("mlp", devices=2, steps=3, seed=1))
    assert one.losses != other.losses


@pytest.mark.parametrize("options", [{"steps": 4}, {"epochs": 1}])
async def test_of_steps_and_epochs_the_smaller_wins(options: dict[str, Any]) -> None:
    case = Case("mlp", devices=2, **{"steps": 100, "epochs": 2, **options})
    steps_per_epoch = zoo.SAMPLES // case.batch_size
    assert len((await with_p2ptrain(case)).losses) == min(case.steps, case.epochs * steps_per_epoch)


def test_the_comparison_can_fail() -> None:
    """A reference with another learning rate differs, so equality above means something."""
    one = plain_torch(Case("mlp", devices=1, steps=3, optimizer=SGD(lr=0.05)))
    other = plain_torch(Case("mlp", devices=1, steps=3, optimizer=SGD(lr=0.05001)))
    assert difference(one, other).loss > 0
    assert difference(one, other).state > 0
