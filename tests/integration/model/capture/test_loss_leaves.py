"""Labels that a model takes as inputs go to the stages that use them, and cross no cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from p2ptrain.job.batch_parts import own_loss
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.stage.stage import Stage

WORDS, LENGTH = 9, 5


class _Model(nn.Module):
    """Words, three layers, scores of the next words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.other = nn.Embedding(WORDS, 6), nn.Embedding(WORDS, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, WORDS)

    def scored(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(x)
        return {"loss": cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class _Labelled(_Model):
    def forward(self, words: Tensor, labels: Tensor) -> Any:
        return self.scored(self.hidden(self.words(words)), labels)


class _ShiftedFirst(_Model):
    """Labels are what the decoder reads, too, and are shifted in place before all else."""

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        shifted = labels.new_zeros(labels.shape)
        shifted[:, 1:] = labels[:, :-1].clone()
        shifted.masked_fill_(shifted == -100, 1)
        encoded = self.hidden(self.words(words))
        return self.scored(encoded + self.other(shifted), labels)


class _Conditioned(_Model):
    """What is drawn follows from the labels from the first layer on."""

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        x = self.other(labels.clamp(min=0)) + self.words(words)
        return self.scored(self.hidden(x), labels)


class _Masked(_Model):
    """A mask that the first layer takes is no label, though a mean is taken with it at the end."""

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        x = self.hidden(self.words(words) * mask[..., None].float())
        return {"loss": (x * mask[..., None]).sum() / mask.sum()}


class _Autoencoder(_Model):
    def forward(self, x: Tensor) -> Any:
        return {"loss": mse_loss(self.hidden(x), x)}


class _Residual(_Model):
    """The input is added again and again: only the last sum is compared with labels."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return {"loss": mse_loss(x, one_hot(y, 6).float())}


class _Scores(_Model):
    def forward(self, words: Tensor, labels: Tensor, image: Tensor) -> Tensor:
        return self.scored(self.hidden(self.words(words) + image), labels)["scores"]


def _of_batch(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@dataclass(frozen=True)
class _Case:
    """`entering` the first unit; `targets` go where they are used, some to `earliest`."""

    model: Callable[[], nn.Module]
    entering: tuple[str, ...]
    targets: tuple[str, ...]
    earliest: int | None
    loss: Any = own_loss


CASES = {
    "labels": _Case(_Labelled, ("words",), ("labels",), 4),
    "decoder": _Case(_ShiftedFirst, ("words",), ("labels",), 4),
    "conditioned": _Case(_Conditioned, ("words", "labels"), (), None),
    "masked": _Case(_Masked, ("words", "mask"), (), None),
    "autoencoder": _Case(_Autoencoder, ("x",), ("x",), 2),
    "residual": _Case(_Residual, ("x",), ("y",), 2),
    "loss of a dict": _Case(_Scores, ("words", "image"), ("labels",), 4, _of_batch),
}


def _batch(keys: set[str]) -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (4, LENGTH))
    every = {
        "words": words,
        "labels": words.index_fill(1, torch.tensor([2]), -100),
        "mask": torch.ones(4, LENGTH, dtype=torch.int64),
        "x": torch.randn(4, LENGTH, 6),
        "y": words % 6,
        "image": torch.randn(4, LENGTH, 6),
    }
    return {key: every[key] for key in every if key in keys}


@pytest.mark.parametrize("name", CASES)
def test_labels_reach_the_stages_that_use_them_and_no_other(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    model = case.model()
    batch = _batch({*case.entering, *case.targets})
    pair = (batch, None if case.loss is own_loss else batch)
    captured = capture(model, case.loss, pair)
    described = captured.description
    keys = list(batch)
    for mode in ("train", "eval"):
        entering = [keys[value.index] for value in described.crossing_values(0, mode)]
        assert sorted(entering) == sorted(case.entering)
    targets = captured.targets(pair)
    assert len(targets) == len(case.targets)
    assert all(torch.equal(t, batch[k]) for t, k in zip(targets, case.targets, strict=True))
    borders = range(len(described.units) + 1)
    uses = [k for k, unit in enumerate(pairwise(borders)) if described.target_uses(*unit, "train")]
    assert uses[:1] == ([] if case.earliest is None else [case.earliest])

    values, last = captured.entering(batch, "train"), borders[-2]
    stages = [Stage(described, k, k + 1, captured.state()) for k in borders[:-1]]
    for number, stage in enumerate(stages):
        given = targets if number in uses else []
        values = stage.forward(0, values, given, weight=1.0 if number == last else None)  # type: ignore[assignment]
    gradients: Any = ()
    for stage in reversed(stages):
        gradients = stage.backward(0, gradients)
    loss = case.loss(model(**batch), pair[1])
    loss.backward()
    assert torch.equal(values[0], loss)
    assert len(stages) > 2
    for stage in stages:
        for key, parameter in stage.parameters().items():
            own = model.get_parameter(key).grad
            assert own is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, own)
