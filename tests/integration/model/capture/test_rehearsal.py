"""What is captured is compared with the user's own module before anything is trained."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.checkpoint import checkpoint

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.rehearsal import Rehearsal, RehearsalEffort, rehearse


class Scaled(nn.Module):
    """Scales by what `factor` gives at each call."""

    def __init__(self, factor: Callable[[Scaled], Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.factor = [factor]

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.last(self.first(x).relu()) * self.factor[0](self)
        return scaled


class Counted:
    calls: ClassVar[int] = 0


def _class_attribute(_: Scaled) -> float:
    Counted.calls += 1
    return 1 + Counted.calls / 10


def _numbers() -> Iterator[float]:
    yield from (1 + k / 10 for k in range(1000))


def _batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g))
        for _ in range(count)
    ]


def _rehearsed(model: nn.Module, effort: RehearsalEffort = RehearsalEffort()) -> Rehearsal:  # noqa: B008
    captured = capture(model, cross_entropy, _batches(1)[0], evaluation=False)
    return rehearse(model, cross_entropy, captured, iter(_batches()), effort)


@pytest.mark.parametrize("kind", ["iterator", "generator", "class"])
def test_state_that_a_trace_does_not_see_is_refused(kind: str) -> None:
    count, numbers = itertools.count(10), _numbers()
    factors: dict[str, Callable[[Scaled], Any]] = {
        "iterator": lambda _: next(count) / 10,
        "generator": lambda _: next(numbers),
        "class": _class_attribute,
    }
    with pytest.raises(CaptureError, match=r"the loss of batch \d is .*, captured .*forward\(\)"):
        _rehearsed(Scaled(factors[kind]))


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.last, self.generator = nn.Linear(8, 3), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x = dropout(self.layers(x + torch.bernoulli(x.sigmoid(), generator=self.generator)), 0.1)
        out: Tensor = self.last(x)
        return out


def test_random_numbers_and_statistics_are_the_same_and_nothing_stays_changed() -> None:
    model = Random()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    marks = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    own = model.generator.get_state()
    assert _rehearsed(model) == Rehearsal(8)
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name], tensor), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(marks[0], torch.get_rng_state())
    assert marks[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert torch.equal(own, model.generator.get_state())


def test_two_batches_are_compared_however_long_they_take_and_no_more() -> None:
    clock = itertools.count(0.0, 5.0)
    model = Scaled(lambda _: 2.0)
    captured = capture(model, cross_entropy, _batches(1)[0], evaluation=False)
    found = rehearse(
        model, cross_entropy, captured, iter(_batches()), RehearsalEffort(), lambda: next(clock)
    )
    assert found == Rehearsal(2)


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("mind the gap", stacklevel=1)
        out: Tensor = checkpoint(self.linear, x, use_reentrant=True)
        return out


def test_what_the_users_code_and_torch_warn_of_is_shown_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    with pytest.raises(CaptureError):  # nothing is learnt behind such a checkpoint
        _rehearsed(Warns())
    model = nn.Sequential(Warns(), nn.Linear(3, 3))
    assert _rehearsed(model).batches == 8
    said = [str(warning.message) for warning in recwarn]
    assert said.count("mind the gap") == 1
    assert len([text for text in said if "None of the inputs have requires_grad" in text]) == 1


def test_standard_error_stays_everybodys_while_a_model_is_captured() -> None:
    seen: list[object] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(sys.stderr)
            return super().forward(x)

    stderr = sys.stderr
    _rehearsed(Looks(6, 3))
    assert all(stream is stderr for stream in seen)


class Normed(nn.Module):
    """Keeps its normalisation in evaluation mode, by a `train` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(x))
        return out


def test_a_train_of_the_user_s_own_is_called_as_a_loop_does() -> None:
    model = Normed()
    captured = capture(model, cross_entropy, _batches(1)[0], evaluation=False)
    described = captured.description.train.nodes
    assert not [node for node in described if node.operator == "aten.add_.Tensor"]
    assert model.norm.training, "as it was"
    assert rehearse(model, cross_entropy, captured, iter(_batches()), RehearsalEffort()).batches
    assert torch.equal(model.norm.running_mean, torch.full((6,), 0.5))  # type: ignore[arg-type]


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x.mul_(0.5))
        return out


def test_a_model_that_writes_to_its_input_is_compared_with_the_same_input() -> None:
    assert _rehearsed(Halving()) == Rehearsal(8)


def test_sparse_gradients_are_compared() -> None:
    words = nn.Sequential(nn.EmbeddingBag(9, 3, sparse=True))
    batches = [(torch.tensor([[k, 2], [1, k]]), torch.tensor([0, 2])) for k in range(3)]
    captured = capture(words, cross_entropy, batches[0], evaluation=False)
    assert rehearse(words, cross_entropy, captured, iter(batches), RehearsalEffort()).batches == 3
