"""Lines that only check values are passed by a trace; lines that decide are refused.

PYTEST_DONT_REWRITE: the models' assertions are looked at as they are written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture

Check = Callable[[Tensor], Tensor | None]


def asserts(x: Tensor) -> None:
    assert not torch.isnan(x).any(), "not a number"


def asserts_two(x: Tensor) -> None:
    assert torch.isfinite(x).all() and (x < 100).all()  # noqa: PT018


def asserts_one_of(x: Tensor) -> None:
    assert (x < 100).all() or (x > 100).all()


def raises(x: Tensor) -> None:
    if x.max() >= 100:
        raise ValueError("too large")


def raises_for_several(x: Tensor) -> None:
    if (
        x is None
        or (x > 100).any()
        or not torch.isfinite(x).all()
        or not ((x < 100).all() and not (x < -100).any())
    ):
        raise ValueError("out of range")


def raises_after_a_line(x: Tensor) -> None:
    if x.shape[1] == 4 and (x > 100).any():
        largest = x.max()
        raise ValueError(f"too large: {largest}")


def decides(x: Tensor) -> Tensor | None:
    if (x > 0).any():
        return x * 2
    return None


def decides_else(x: Tensor) -> Tensor | None:
    if (x > 100).any():
        raise ValueError("too large")
    if (x > 0).any():
        return x * 2
    return None


def as_number(x: Tensor) -> None:
    if x.max().item() > 100:
        raise ValueError("too large")


class Checking(nn.Module):
    def __init__(self, check: Check) -> None:
        super().__init__()
        self.check = check
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        other = self.check(x)
        return self.linear(x if other is None else other)  # type: ignore[no-any-return]


EXAMPLE = torch.rand(8, 4), torch.rand(8, 2)


@pytest.mark.parametrize(
    "check",
    [asserts, asserts_two, asserts_one_of, raises, raises_for_several, raises_after_a_line],
    ids=lambda check: check.__name__,
)
def test_a_check_is_passed_and_named(check: Check) -> None:
    captured = capture(Checking(check), mse_loss, EXAMPLE, evaluation=False)
    (line,) = captured.unchecked
    assert line.startswith(f"{__file__}:")
    assert not any("assert" in node.operator for node in captured.description.train.nodes)


@pytest.mark.parametrize("check", [decides, decides_else], ids=lambda check: check.__name__)
def test_a_decision_is_refused(check: Check) -> None:
    with pytest.raises(CaptureError, match="decides in Python on the values"):
        capture(Checking(check), mse_loss, EXAMPLE, evaluation=False)


def test_a_check_of_a_number_is_refused_with_what_helps() -> None:
    with pytest.raises(CaptureError, match="Write the check with tensors"):
        capture(Checking(as_number), mse_loss, EXAMPLE, evaluation=False)
