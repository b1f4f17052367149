"""Micro-batches that a model cannot compute are neither measured nor planned, but refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.plan.types.weight_versions import Weights

DOUBLE = AsyncOptions(Weights.DOUBLE)


class Dropping(nn.Module):
    """The most common way to get rid of a dimension of one; of a batch of one it is two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze()


def hardest_three(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none").topk(3).values.mean()


def job(
    model: nn.Module, loss: Callable[..., Tensor], batch_size: int, micro_batch: int | None
) -> Job:
    """Of equal models and losses, that have been captured once for all."""
    whole = loss is hardest_three
    values = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    data: list[Any] = [
        (x, n % 2 if whole else values.new_tensor(n % 2)) for n, x in enumerate(values)
    ]
    return Job(model, data, loss, SGD(lr=0.1), batch_size=batch_size, micro_batch=micro_batch)


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    """The same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model()


def dropping(batch_size: int, micro_batch: int | None, **options: Any) -> PreparedJob:
    asked = job(seeded(Dropping), binary_cross_entropy_with_logits, batch_size, micro_batch)
    return prepare(asked, TrainOptions(**options))


def of_three(batch_size: int, micro_batch: int | None) -> PreparedJob:
    model = seeded(lambda: nn.Linear(5, 2))
    return prepare(job(model, hardest_three, batch_size, micro_batch), TrainOptions())


class DroppingOneOfTwo(Dropping):
    """Of two inputs it uses the second."""

    def forward(self, unused: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_what_is_forced_is_tried_without_what_the_model_does_not_use() -> None:
    data = [((torch.randn(3), torch.randn(5)), torch.tensor(n % 2.0)) for n in range(24)]
    asked = Job(DroppingOneOfTwo(), data, mse_loss, SGD(lr=0.1), batch_size=5, micro_batch=4)
    assert prepare(asked, TrainOptions()).min_micro_batch == 1


@pytest.mark.parametrize("micro_batch", [None, 2, 4, 12])
def test_the_job_is_prepared_with_pieces_that_compute(micro_batch: int | None) -> None:
    prepared = dropping(12, micro_batch)
    assert (prepared.min_micro_batch, prepared.sharing.divisible) == (2, False)


@pytest.mark.parametrize(("batch_size", "micro_batch"), [(12, None), (12, 3), (3, None), (11, 4)])
def test_a_loss_over_the_hardest_three_is_prepared(batch_size: int, micro_batch: int) -> None:
    prepared = of_three(batch_size, micro_batch)
    assert (prepared.min_micro_batch, prepared.sharing.divisible) == (3, False)


@pytest.mark.parametrize(("batch_size", "micro_batch"), [(12, 1), (13, 4), (1, None)])
def test_a_piece_of_one_that_the_model_cannot_compute_is_refused(
    batch_size: int, micro_batch: int | None
) -> None:
    says = "cannot train on 1 sample .* a micro-batch of one: choose batch_size and micro_batch"
    with pytest.raises(CaptureError, match=says):
        dropping(batch_size, micro_batch)


@pytest.mark.parametrize(("batch_size", "micro_batch"), [(12, 2), (14, 4), (2, None)])
def test_a_piece_of_two_of_the_hardest_three_is_refused(
    batch_size: int, micro_batch: int | None
) -> None:
    says = "on 2 samples .*layer .* a micro-batch of so few: .* is below 3"
    with pytest.raises(CaptureError, match=says):
        of_three(batch_size, micro_batch)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_piece_of_one_that_plain_torch_computes_is_trained() -> None:
    """Without its dimension too the square of a difference is that of this sample."""
    prepared = prepare(job(seeded(Dropping), mse_loss, 4, 1), TrainOptions())
    assert (prepared.min_micro_batch, prepared.sharing.divisible) == (1, False)
    assert prepare(job(seeded(Dropping), mse_loss, 4, 2), TrainOptions()).min_micro_batch == 2


def test_a_piece_of_one_without_a_barrier_is_refused_or_not_chosen() -> None:
    """Eight pieces of eight samples are made where two versions are kept."""
    with pytest.raises(CaptureError, match="micro-batch of one"):
        dropping(8, None, mode="async", asynchrony=DOUBLE)
    assert dropping(16, None, mode="async", asynchrony=DOUBLE).min_micro_batch == 2
    prepared = dropping(8, None, mode="auto", asynchrony=DOUBLE)
    assert "a micro-batch would have 1 samples, and the model needs 2" in prepared.only_rounds
    assert dropping(16, None, mode="auto", asynchrony=DOUBLE).only_rounds == ""
