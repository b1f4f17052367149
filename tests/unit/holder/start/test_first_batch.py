"""What is said where the user's own module cannot compute the data's first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.holder.start.first_batch import explained
from p2ptrain.model.capture.export_errors import FailsItself, user_place

X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])
ERROR = CaptureError("as the trace says it")
Loss = Callable[[Any, Any], Tensor]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def _words(model: nn.Module, batch: tuple[Any, Any], loss: Loss = cross_entropy) -> str:
    found = explained(model, loss, [batch], ERROR)
    assert isinstance(found, ScriptError)
    return str(found)


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (_net(), (X.double(), Y), 'float64, the model float32 (layer "0" (Linear)): x.float()'),
        (_net(), (torch.ones(6, 8, dtype=torch.uint8), Y), "the input is uint8, the model float32"),
        (_net().bfloat16(), (X, Y), "the input is float32, the model bfloat16"),
        (_net(), (X[:, :7], Y), 'layer "0" (Linear) expects 8 numbers a sample, the data has 7'),
        (nn.Conv1d(3, 2, 1), (torch.ones(6, 4, 5), Y), "the Conv1d expects 3 channels, the data"),
        (nn.Sequential(nn.Embedding(5, 3)), (Y + 3, Y), "has 5 entries (0 to 4), the data's ind"),
        (nn.Sequential(nn.Embedding(5, 3)), (Y - 1, Y), "indices go down to -1"),
        (nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 3)), (X, Y), "expects 5 numbers a sample, it"),
        (_net(), (X, Y + 5), "labels go up to 7, but the model has 3 outputs (0 to 2)"),
        (_net(), (X, Y - 1), "labels go down to -1, but the model has 3 outputs"),
        (_net(), (X, Y.float()), "takes class numbers (int64) as targets; the targets are float32"),
    ],
)
def test_the_slip_is_named(model: nn.Module, batch: tuple[Tensor, Tensor], words: str) -> None:
    told = _words(model, batch)
    assert "fails on the first batch, in plain torch too: " in told
    assert words in told


def test_a_loss_that_fails_otherwise_shows_what_it_was_given() -> None:
    told = _words(_net(), (X, torch.ones(6, 2)), lambda y, t: mse_loss(y - t, t))
    assert "the model gives float32 [6, 3], the target is float32 [6, 2]" in told


def test_a_batch_that_plain_torch_computes_leaves_the_error_as_it_is() -> None:
    assert explained(_net(), cross_entropy, [(X, Y)], ERROR) is ERROR


def test_the_batch_behind_the_first_is_tried_too() -> None:
    told = str(explained(_net(), cross_entropy, [(X, Y), (X, Y + 5)], ERROR))
    assert "labels go up to 7" in told


def test_a_model_for_one_batch_size_is_not_said_to_fail_in_plain_torch() -> None:
    mix = torch.eye(6)
    model = nn.Sequential(nn.Linear(8, 3))
    found = explained(
        model, lambda y, t: cross_entropy(mix @ y, t), [(X, Y)], FailsItself(RuntimeError("11"))
    )
    assert isinstance(found, CaptureError)
    assert "computes the job's mini-batch of 6 samples in plain torch, and fails with 5" in str(
        found
    )


def test_what_only_a_trace_cannot_compute_is_not_said_to_fail_in_plain_torch() -> None:
    found = explained(_net(), cross_entropy, [(X, Y)], FailsItself(RuntimeError("stand-in")))
    assert "though plain torch computes its first batch: it fails: RuntimeErr" in str(found)


def test_a_library_s_line_is_named_beside_the_user_s_own() -> None:
    with pytest.raises(numpy.linalg.LinAlgError) as caught:
        numpy.linalg.inv(numpy.ones((2, 3)))
    own, _, library = str(user_place(caught.value)).partition(", in ")
    assert own.startswith(f"{__file__}:")
    assert "numpy" in library


def test_the_module_stays_as_it_was() -> None:
    model = _net().eval()
    held = [str(vars(part)) for part in model.modules()]
    drawn = torch.get_rng_state()
    explained(model, cross_entropy, [(X, Y)], ERROR)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [str(vars(part)) for part in model.modules()] == held, "weights, modes and hooks"
