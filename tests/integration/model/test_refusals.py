"""What is said to those whose model cannot be captured: where it is, and what to write instead."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from tests.support.odd_models import AfterLinear

_EXAMPLE = torch.randn(4, 8), torch.randn(4, 8)


def _decides(x: Tensor) -> Tensor:
    return x + 1 if x.sum().item() > 0 else x


def _fixed_batch(x: Tensor) -> Tensor:
    return x.reshape(4, 2, 4).flatten(1)


def _only_even_batches(x: Tensor) -> Tensor:
    return x if x.shape[0] % 2 else x + 1


def _as_pairs(x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    return torch.cat([first - second, second])


def _every_other(x: Tensor) -> Tensor:
    return (x[::2] - x[1::2]).repeat(2, 1)


def _as_threes(x: Tensor) -> Tensor:
    return x.reshape(-1, 3, 8).flip(1).flatten(0, 1)


def _normalises_channels(x: Tensor) -> Tensor:
    return nn.CrossMapLRN2d(2)(x.reshape(-1, 2, 2, 2)).flatten(1)


def _leaves_torch(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy()) + x


def _counts_samples(x: Tensor) -> Tensor:
    return torch.stack([x[k] + 1 for k in range(len(x))])


def _loops_over_samples(x: Tensor) -> Tensor:
    return torch.stack([row + 1 for row in x])


def _branches(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))  # type: ignore[no-untyped-call]
    return out


def _loops_until(x: Tensor) -> Tensor:
    out: Tensor = while_loop(lambda x: x.norm() > 1, lambda x: (x * 0.5,), (x,))[0]
    return out


def _scans(x: Tensor) -> Tensor:
    out: Tensor = associative_scan(lambda a, b: a * b, x, 1, combine_mode="generic")
    return out


def _lists_a_number_for_each(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0] * x.shape[0])[:, None]


def _other_operator(x: Tensor) -> Tensor:
    return torch.ops.aten.resize.default(x, [x.shape[0], 8])


_CALLS_F = AfterLinear.forward.__code__


@cache
def _refusal(f: Callable[[Tensor], Tensor]) -> str:
    """What is said of a model with `f`."""
    with pytest.raises(CaptureError) as caught:
        capture(AfterLinear(f), mse_loss, _EXAMPLE)
    return str(caught.value)


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (_decides, "return x + 1 if x.sum().item() > 0 else x"),
        (_decides, "torch.where"),
        (_fixed_batch, "return x.reshape(4, 2, 4).flatten(1)"),
        (_fixed_batch, "one batch size only"),
        (_only_even_batches, "one batch size only"),
        (_only_even_batches, "return x if x.shape[0] % 2 else x + 1"),
        (_only_even_batches, "satisfy the generated guard"),
        (_as_pairs, "return torch.cat([first - second, second])"),
        (_as_pairs, "only for batches that can be divided by 2"),
        (_every_other, "return (x[::2] - x[1::2]).repeat(2, 1)"),
        (_every_other, "only for batches that can be divided by 2"),
        (_as_threes, "return x.reshape(-1, 3, 8).flip(1).flatten(0, 1)"),
        (_as_threes, "only for batches that can be divided by 3"),
        (_normalises_channels, "return nn.CrossMapLRN2d(2)(x.reshape(-1, 2, 2, 2)).flatten(1)"),
        (_normalises_channels, "torch's CrossMapLRN2d takes one batch size only"),
        (_counts_samples, "return torch.stack([x[k] + 1 for k in range(len(x))])"),
        (_counts_samples, "one batch size only"),
        (_loops_over_samples, "for row in x"),
        (_leaves_torch, "return torch.from_numpy(x.detach().numpy()) + x"),
        (_other_operator, "aten.resize.default"),
        (_branches, "torch.where(condition, one, other)"),
        (_loops_until, "a Python loop with as many steps as may be needed"),
        (_scans, "combine_mode="),
        (_scans, "not carry associative_scan to other devices. Use torch.cumsum"),
        (_lists_a_number_for_each, "return x * torch.tensor([2.0] * x.shape[0])[:, None]"),
        (_lists_a_number_for_each, "torch.full((n,), value)"),
        (_counts_samples, "Python itself takes it as a plain number"),
        (_branches, f'File "{_CALLS_F.co_filename}", line {_CALLS_F.co_firstlineno + 1}'),
    ],
)
def test_what_cannot_be_captured_is_explained(
    f: Callable[[Tensor], Tensor], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert says in _refusal(f)
    assert "def forward" not in capfd.readouterr().err


def test_a_layer_of_torch_that_fixes_the_batch_size_is_named() -> None:
    layers = nn.Unflatten(1, (2, 2, 2)), nn.CrossMapLRN2d(2), nn.Flatten()
    with pytest.raises(CaptureError, match=r"captured: torch's CrossMapLRN2d takes one batch size"):
        capture(nn.Sequential(nn.Linear(8, 8), *layers), mse_loss, _EXAMPLE)


def test_the_users_own_line_is_named() -> None:
    line = _decides.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} " in _refusal(_decides)
    assert "x.sum()" in linecache.getline(__file__, line)


def _only_nine(x: Tensor) -> Tensor:
    if x.shape[1] != 9:
        raise ValueError("nine features, please")
    return x


@pytest.mark.parametrize(
    ("model", "loss", "told"),
    [
        (
            nn.Sequential(nn.Linear(8, 8), nn.Linear(6, 4)),
            mse_loss,
            "in Linear(in_features=6, out_features=4, bias=True): RuntimeError: mat1 and mat2",
        ),
        (nn.Linear(8, 8), lambda y, t: (y - t[:, :3]).mean(), "RuntimeError: The size of tensor a"),
        (AfterLinear(_only_nine), mse_loss, "ValueError: nine features, please"),
    ],
)
def test_what_plain_torch_refuses_too_is_reported_in_its_words(
    model: nn.Module, loss: Callable[..., Tensor], told: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, loss, _EXAMPLE)
    assert "fails on the first samples of the data, in plain torch too" in str(caught.value)
    assert told in str(caught.value)


def _as_number(output: Tensor, target: Tensor) -> Any:
    return mse_loss(output, target).item()


def test_a_loss_that_is_no_tensor_is_named() -> None:
    with pytest.raises(CaptureError, match=r"number, not a tensor: leave out \.item\(\)"):
        capture(nn.Linear(8, 8), _as_number, _EXAMPLE)


def test_what_only_a_trace_refuses_is_not_reported_so() -> None:
    with pytest.raises(CaptureError, match="cannot follow this") as caught:
        capture(AfterLinear(lambda x: x + float(x.detach().numpy().mean())), mse_loss, _EXAMPLE)
    assert "plain torch too" not in str(caught.value)
