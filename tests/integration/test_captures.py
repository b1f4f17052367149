"""Sharing captures among tests: equal models only, each with its own tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.plain_run import ComparedBatches
from tests.support import captures, zoo
from tests.support.reference import stack

Change = Callable[[zoo.Made], object]


@cache
def _mlp() -> Captured:
    made = zoo.make("mlp")
    return capture(made.model, made.loss, stack(made.data[:3]))


@pytest.fixture
def made_again(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured; that takes a moment where they have an mlp's tensors."""
    seen: list[nn.Module] = []

    def noted(module: nn.Module, *rest: Any, **options: Any) -> Captured:
        seen.append(module)
        alike = module.state_dict().keys() == zoo.make("mlp").model.state_dict().keys()
        return copy.copy(_mlp()) if alike else capture(module, *rest, **options)

    monkeypatch.setattr(captures, "capture", noted)
    monkeypatch.setattr(captures, "_KNOWN", {})
    monkeypatch.setattr(captures, "_COMPARED", set())
    return seen


def _captured(made: zoo.Made) -> Captured:
    return captures.captured(made.model, made.loss, stack(made.data[:3]))


@pytest.mark.parametrize("name", ["frozen", "gpt"])
def test_an_equal_model_is_not_captured_again_and_has_its_own_tensors(
    name: str, made_again: list[nn.Module]
) -> None:
    one, other = zoo.make(name), zoo.make(name)
    first, second = _captured(one), _captured(other)
    assert made_again == [one.model]
    assert second.description == first.description
    own = dict(other.model.state_dict())
    for key, tensor in second.state().items():
        assert key not in own or tensor.data_ptr() == own[key].data_ptr(), key
    before = {key: tensor.clone() for key, tensor in one.model.state_dict().items()}
    second.load_state({key: torch.zeros_like(tensor) for key, tensor in first.state().items()})
    assert not any(tensor.any() for tensor in other.model.state_dict().values())
    for key, tensor in one.model.state_dict().items():
        assert torch.equal(before[key], tensor), key


def test_an_equal_model_is_compared_in_full_once(made_again: list[nn.Module]) -> None:
    def compared(made: zoo.Made) -> int:
        run = captures.computed_plainly(
            *(made.model, made.loss, lambda number, samples: stack(made.data[:samples])),
            None,
            range(1, 5),
            ComparedBatches(least=3, most=3),
        )
        return len(run.steps)

    assert [compared(zoo.make("cnn")) for _ in range(2)] == [3, 1]
    unknown = zoo.make("mlp")
    weight_norm(next(m for m in unknown.model.modules() if isinstance(m, nn.Linear)))
    assert [compared(unknown) for _ in range(2)] == [3, 3]


def test_units_that_one_holder_changes_are_its_own(made_again: list[nn.Module]) -> None:
    first = _captured(zoo.make("mlp"))
    before = first.description
    first.description = dataclasses.replace(before, name="another")
    assert _captured(zoo.make("mlp")).description == before


def _other_weight(made: zoo.Made) -> None:
    nn.init.constant_(next(made.model.parameters()), 0.5)


def _other_samples(made: zoo.Made) -> None:
    made.data[:3] = made.data[3:6]


@pytest.mark.parametrize(
    "change",
    [
        _other_weight,
        _other_samples,
        lambda made: next(made.model.parameters()).requires_grad_(False),
        lambda made: made.model.eval(),
        lambda made: made.model.register_forward_hook(print),
    ],
)
def test_whatever_differs_is_captured_again(change: Change, made_again: list[nn.Module]) -> None:
    one, other = zoo.make("mlp"), zoo.make("mlp")
    change(other)
    _captured(one), _captured(other)
    assert made_again == [one.model, other.model]


def test_another_loss_or_mode_is_captured_again(made_again: list[nn.Module]) -> None:
    one = zoo.make("mlp")
    example = stack(one.data[:3])
    captures.captured(one.model, cross_entropy, example)
    captures.captured(one.model, zoo.smooth_margin, example)
    captures.captured(one.model, cross_entropy, example, evaluation=False)
    assert len(made_again) == 3


def test_what_a_test_defines_for_itself_is_never_shared(made_again: list[nn.Module]) -> None:
    one = zoo.make("mlp")
    for factor in (1.0, 2.0):
        found = captures.captured(
            one.model,
            lambda output, target, factor=factor: factor * cross_entropy(output, target),
            stack(one.data[:3]),
        )
        assert found.description.units
    assert len(made_again) == 2


def test_a_model_that_refuses_to_be_written_is_captured_as_ever(
    made_again: list[nn.Module],
) -> None:
    one = zoo.make("mlp")
    weight_norm(next(m for m in one.model.modules() if isinstance(m, nn.Linear)))
    assert _captured(one).description.units
    assert made_again == [one.model]


class Noting(nn.Module):
    """Writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.seen = torch.zeros(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        self.seen.add_(out.detach().sum(0))
        return out


def test_a_model_that_writes_to_what_it_does_not_own_is_never_shared(
    made_again: list[nn.Module],
) -> None:
    data = zoo.make("mlp").data
    with torch.random.fork_rng(devices=[]):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Noting())
    for model in models:
        captures.captured(model, cross_entropy, stack(data[:3]))
    assert made_again == models
