"""How few samples a model computes, against what plain torch gives for so few."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, pdist

from p2ptrain.errors import CaptureError
from p2ptrain.holder.start.micro_batch import within
from p2ptrain.model.capture.capture import capture

Loss = Callable[[Tensor, Tensor], Tensor]


class _Then(nn.Module):
    """A linear layer, then `f(x)`."""

    def __init__(self, f: Callable[[Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.linear(x))


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.flatten(1).mean(1) - target).square()


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return _squares(output, target).mean()


def _hardest(count: int) -> Loss:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return _squares(output, target).topk(count).values.mean()

    return loss


def _probabilities(output: Tensor, target: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(output, target.float())


def _neighbours(output: Tensor, target: Tensor) -> Tensor:
    return (output[1:] - output[:-1])[1].square().mean() + target.sum() * 0


def _drawn(x: Tensor) -> Tensor:
    return x[torch.randperm(x.shape[0])]


def _chosen(x: Tensor) -> Tensor:
    return x * (x[x > 0].sum() > 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, int]] = {
    "each sample for itself": (lambda: nn.Linear(4, 4), cross_entropy, 1),
    "drops a batch of one": (lambda: _Then(lambda x: x.squeeze(), 1), _probabilities, 2),
    "drops its own dimension": (lambda: _Then(lambda x: x.squeeze(1), 1), _probabilities, 1),
    "two hardest": (lambda: nn.Linear(4, 4), _hardest(2), 2),
    "three hardest": (lambda: nn.Linear(4, 4), _hardest(3), 3),
    "sixteen hardest": (lambda: nn.Linear(4, 4), _hardest(16), 16),
    "a hundred hardest": (lambda: nn.Linear(4, 4), _hardest(100), 100),
    "the third and the second": (lambda: nn.Linear(4, 4), _neighbours, 3),
    "normalises": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), _mean, 2),
    "draws": (lambda: _Then(_drawn), _mean, 1),
    "shapes that hang on values": (lambda: _Then(_chosen), _mean, 1),
}


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.arange(samples) % 2


def _trains(model: nn.Module, loss: Loss, samples: int) -> bool:
    x, y = _batch(samples)
    try:
        loss(model.train()(x), y).backward()
    except (ValueError, RuntimeError, IndexError):
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_the_fewest_samples_are_those_that_plain_torch_needs(name: str) -> None:
    build, loss, least = MODELS[name]
    captured = capture(build(), loss, _batch(4), evaluation=False)
    assert captured.trains.least == least
    assert _trains(build(), loss, least)
    assert not any(_trains(build(), loss, fewer) for fewer in range(1, least))


def test_an_evaluation_needs_what_its_own_graph_needs() -> None:
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    captured = capture(norm, _mean, _batch(4))
    assert (captured.trains.least, captured.evaluates.least) == (2, 1)
    captured = capture(nn.Linear(4, 4), _hardest(3), _batch(4))
    assert (captured.trains.least, captured.evaluates.least) == (3, 3)


def _centres_many(x: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] >= 7 else x


@pytest.mark.parametrize(
    ("f", "known"),
    [
        (lambda x: x, 1),
        (lambda x: x.squeeze(1), 1),
        (lambda x: x + pdist(x).mean(), 3),  # torch.export says no number
        (_centres_many, 7),  # and does something else with fewer
    ],
)
def test_below_what_torch_export_has_looked_at_the_graph_is_not_known(
    f: Callable[[Tensor], Tensor], known: int
) -> None:
    captured = capture(_Then(f), _mean, _batch(4), evaluation=False)
    assert captured.trains.known == known
    assert captured.trains.least >= known


def _asks_for_many(x: Tensor) -> Tensor:
    """As diffusers' U-Nets do in front of a kernel that fails with large batches."""
    return x.contiguous() if x.shape[0] >= 64 else x


def test_above_what_torch_export_has_looked_at_the_graph_is_not_known() -> None:
    captured = capture(_Then(_asks_for_many), _mean, _batch(4))
    assert (captured.trains.known, captured.trains.most, captured.most) == (1, 63, 63)
    assert within(None, 63, captured) is None
    assert within(None, 128, captured) == 32
    with pytest.raises(CaptureError, match="set micro_batch to 63 or fewer"):
        within(64, 128, captured)
    captured = capture(_Then(_centres_many), _mean, _batch(4), evaluation=False)
    assert captured.most is None


def test_trying_says_nothing_on_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    example = torch.ones(4, 4), torch.zeros(4).long()
    captured = capture(_Then(_drawn), _hardest(2), example, evaluation=False)
    assert captured.trains.least == 2
    assert capfd.readouterr().err == ""
