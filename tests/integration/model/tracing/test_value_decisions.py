"""Lines that ask for values: samples that go the way of the first ones are computed.

PYTEST_DONT_REWRITE: the models' assertions are looked at as they are written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.checked_operators import UNLIKE
from p2ptrain.model.stage.program import Program

Check = Callable[[Tensor], Tensor | None]


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
    if (x < 100).all():
        return x * 2
    return None


def decides_by_item(x: Tensor) -> Tensor | None:
    return x * 2 if (x < 100).all().item() else None


def skips(x: Tensor) -> Tensor | None:
    rows = (x[:, 0] < 100).nonzero()[:, 0]
    if rows.numel() == 0:
        return None
    return x.index_add(0, rows, x[rows])


def decides_otherwise(x: Tensor) -> Tensor | None:
    if (x > 100).any():
        raise ValueError("too large")
    if (x < 0.5).all():
        return x * 2
    return None


def decides_at_random(x: Tensor) -> Tensor | None:
    return x * 2 if torch.rand(()) < 0.5 else None


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


EXAMPLE = torch.rand(8, 4) * 0.4 + torch.arange(8)[:, None].ge(4) * 0.5, torch.rand(8, 2)

TOO_LARGE = EXAMPLE[0] + 200, EXAMPLE[1]

CHECKS = [asserts_two, asserts_one_of, raises, raises_for_several, raises_after_a_line]

DECISIONS = [decides, decides_by_item, skips]


def computed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    captured = capture(model, mse_loss, EXAMPLE, evaluation=False)
    units = len(captured.description.units)
    program = Program(captured.description, 0, units, "train", dict(model.named_parameters()))
    entering = captured.entering(batch[0], "train")
    (loss,) = program.run(entering, captured.targets(batch), None)
    return loss


@pytest.mark.parametrize("check", [*CHECKS, *DECISIONS], ids=lambda check: check.__name__)
def test_samples_that_go_the_same_way_are_computed(check: Check) -> None:
    model = Checking(check)
    assert torch.equal(computed(model, EXAMPLE), mse_loss(model(EXAMPLE[0]), EXAMPLE[1]))


def test_a_library_whose_name_begins_like_torchs_is_none_of_torch() -> None:
    found: dict[str, Check] = {}
    source = inspect.getsource(skips).replace("Tensor | None", "object")
    filename = f"{Path(torch.__file__).parent}vision/models.py"
    exec(compile(source, filename, "exec"), {"Tensor": Tensor}, found)
    assert computed(Checking(found["skips"]), EXAMPLE).isfinite()


@pytest.mark.parametrize(
    ("check", "text"),
    [
        *((check, r"\(`.*`\) fails") for check in (raises, raises_for_several)),
        *((check, "goes another way. Choose with") for check in (decides, decides_by_item)),
        (skips, "nothing is selected at .*. Leave that `if` out"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_samples_that_go_another_way_are_refused(check: Check, text: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{UNLIKE}.*{text}"):
        computed(Checking(check), TOO_LARGE)


@pytest.mark.parametrize(
    "check", [decides_otherwise, decides_at_random], ids=lambda check: check.__name__
)
def test_what_differs_among_the_first_samples_is_refused(check: Check) -> None:
    with pytest.raises(CaptureError, match="decides in Python on the values"):
        capture(Checking(check), mse_loss, EXAMPLE, evaluation=False)


def test_a_check_of_a_number_is_refused_with_what_helps() -> None:
    with pytest.raises(CaptureError, match="Write the check with tensors"):
        capture(Checking(as_number), mse_loss, EXAMPLE, evaluation=False)
