"""A backward says which gradients are final as soon as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.stage import Stage
from p2ptrain.runtime.reduced_tensors import gradient_order

torch.set_num_threads(1)


class Net(nn.Module):
    """A weight used twice, one frozen, one used in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.evaluated = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.frozen(self.twice(self.first(x)).tanh())).tanh()
        return self.last(x if self.training else self.evaluated(x))


X, Y = torch.randn(6, 4), torch.randint(0, 3, (6,))


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Net(), cross_entropy, (X, Y))


def _forwarded(captured: Captured, tied: tuple[str, ...] = ()) -> Stage:
    units = len(captured.description.units)
    first = dict.fromkeys(tied, True)
    stage = Stage(captured.description, 0, units, captured.state(), tied=first)
    for key in range(2):
        stage.forward(key, [X], [Y])
    return stage


def test_each_gradient_is_final_when_it_is_said_to_be(captured: Captured) -> None:
    stage = _forwarded(captured)
    said: list[str] = []
    values: list[Tensor | None] = []

    def final(name: str) -> None:
        gradient = stage.parameters()[name].grad
        said.append(name)
        values.append(None if gradient is None else gradient.clone())

    stage.backward(0)
    stage.backward(1, final=final)
    description = stage.description
    order = gradient_order(description, 0, len(description.units))
    # The order of buckets is the backward's, up to a layer's own weight and bias.
    assert [name.split(".")[0] for name in said] == [name.split(".")[0] for name in order]
    assert said[-2:] == ["evaluated.weight", "evaluated.bias"]
    for name, value in zip(said, values, strict=True):
        gradient = stage.parameters()[name].grad
        assert (value is None) == (gradient is None) == name.startswith("evaluated")
        assert value is None or torch.equal(value, gradient)


def test_the_bits_are_those_of_a_silent_backward(captured: Captured) -> None:
    silent, loud = _forwarded(captured), _forwarded(captured)
    for key in range(2):
        silent.backward(key)
        loud.backward(key, final=lambda _name: None)
    for name, parameter in silent.parameters().items():
        other = loud.parameters()[name].grad
        assert (other is None) == (parameter.grad is None)
        assert other is None or torch.equal(other, parameter.grad)


def test_only_the_backward_that_was_asked_reports(captured: Captured) -> None:
    stage = _forwarded(captured)
    said: list[str] = []
    stage.backward(0, final=said.append)
    reported = len(said)
    stage.backward(1)
    assert len(said) == reported == len(set(said)) == 8


def test_a_tied_gradient_is_reported_at_the_end(captured: Captured) -> None:
    stage = _forwarded(captured, tied=("last.weight",))
    said: list[str] = []
    stage.backward(0)
    stage.backward(1, final=said.append)
    assert said.index("last.weight") > said.index("first.weight")
    assert stage.parameters()["last.weight"].grad is not None
