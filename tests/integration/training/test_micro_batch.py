"""What is trained follows from the job alone, never from who is in the house."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from p2ptrain.errors import CaptureError, OptionError
from p2ptrain.holder.start.loss_count import Across
from p2ptrain.holder.start.micro_batch import settled
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.job import Job, MicroBatch
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD

BATCH = 64


def negatives(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output @ target.T, torch.arange(output.shape[0]))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / BATCH


class Noisy(nn.Module):
    """Draws random numbers, as a variational autoencoder does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def _layers(*between: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), *between, nn.ReLU(), nn.Linear(8, 6))


def _prepared(
    model: nn.Module, loss: Callable[..., Tensor], asked: MicroBatch = None
) -> PreparedJob:
    values = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(values, values)
    job = Job(model, data, loss, SGD(lr=0.1), batch_size=BATCH, micro_batch=asked)
    return prepare(job, TrainOptions(local=True))


@pytest.mark.parametrize(
    ("model", "loss", "size"),
    [
        (_layers, mse_loss, None),
        (_layers, negatives, BATCH),
        (_layers, summed, BATCH),
        (lambda: _layers(nn.BatchNorm1d(8)), mse_loss, 32),
        (lambda: _layers(nn.Dropout(0.5)), mse_loss, 32),
        (lambda: _layers(nn.BatchNorm1d(8), nn.Dropout(0.5)), summed, BATCH),
        (lambda: _layers(Noisy()), summed, BATCH),
        (lambda: _layers(Noisy()), mse_loss, 32),
    ],
)
def test_an_omitted_micro_batch_follows_from_model_and_loss(
    model: Callable[[], nn.Module], loss: Callable[..., Tensor], size: int | None
) -> None:
    prepared = _prepared(model(), loss)
    assert prepared.job.micro_batch == size
    assert len(prepared.changes) == (size is not None)
    assert all("auto" in change for change in prepared.changes)


def test_where_it_matters_auto_is_the_planners_all_the_same() -> None:
    prepared = _prepared(_layers(), negatives, "auto")
    assert prepared.job.micro_batch is None
    assert "micro_batch=64" in prepared.changes[0]


def test_a_sum_in_parts_is_refused_with_its_factor() -> None:
    assert _prepared(_layers(), summed, BATCH).changes == ()
    with pytest.raises(CaptureError, match=r"micro-batches of 16.* 4 times too small.*=64"):
        _prepared(_layers(Noisy()), summed, 16)


def both_terms(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target) + output.square().mean()


@pytest.mark.parametrize(("loss", "size"), [(cross_entropy, None), (both_terms, BATCH)])
def test_targets_left_out_anywhere_in_ready_tensors_are_counted_or_seen(
    loss: Callable[..., Tensor], size: int | None
) -> None:
    x, y = torch.randn(640, 6), torch.zeros(640, dtype=torch.int64)
    y[333] = -100
    data = torch.utils.data.TensorDataset(x, y)
    job = Job(nn.Linear(6, 3), data, loss, SGD(lr=0.1), batch_size=BATCH)
    prepared = prepare(job, TrainOptions(local=True))
    assert prepared.job.micro_batch == size
    assert len(prepared.changes) == (size is not None)


def test_the_whole_batch_is_smaller_than_what_is_computed_together() -> None:
    size, told = settled(None, 20, Across(statistics="BatchNorm"))
    assert size == 20
    assert "micro_batch is 20" in told


def test_another_word_than_auto_is_no_micro_batch() -> None:
    with pytest.raises(OptionError, match="micro_batch must be a whole number, not 'all'"):
        _prepared(_layers(), mse_loss, "all")  # type: ignore[arg-type]
