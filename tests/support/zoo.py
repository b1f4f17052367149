"""Small models of every shape people bring, each with seeded data and a loss.

`make(name)` gives the same weights and samples every time. Thirty steps of any of them take about a
second on one core. Dropout is off everywhere except in `dropout`, because its masks are seeded by
device-independent rules that plain torch does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.support.reference import cast
from tests.support.zoo_models import (
    ConvNet,
    FrozenBackbone,
    InnerStructures,
    NamedInputs,
    ResidualNet,
    TinyGPT,
    TwoInputs,
    UNet,
    frozen_layers,
    multilayer_perceptron,
)
from tests.support.zoo_transformers import TRANSFORMERS

SAMPLES = 48
CLASSES = 5
VOCABULARY = 40
TOKENS = 12

Sample = tuple[Any, Any]


@dataclass(frozen=True)
class Made:
    """One of the zoo, ready to train."""

    name: str
    model: nn.Module
    data: list[Sample]
    loss: Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class _Entry:
    model: Callable[[], nn.Module]
    sample: Callable[[], Sample]
    loss: Callable[[Any, Any], Tensor] = cross_entropy


def _label() -> Tensor:
    return torch.randint(CLASSES, ())


def _vector() -> Sample:
    return torch.randn(12), _label()


def _image() -> Sample:
    return torch.randn(3, 16, 16), _label()


def _large_image() -> Sample:
    return torch.randn(3, 32, 32), _label()


def _tokens() -> Sample:
    text = torch.randint(VOCABULARY, (TOKENS + 1,))
    return {"input_ids": text[:-1].clone()}, text[1:].clone()


def _text_to_label() -> Sample:
    mask = torch.ones(TOKENS, dtype=torch.int64)
    mask[TOKENS - int(torch.randint(4, ())) :] = 0
    return {"input_ids": torch.randint(VOCABULARY, (TOKENS,)), "attention_mask": mask}, _label()


def _plain_tokens() -> Sample:
    x, y = _tokens()
    return x["input_ids"], y


def _two_inputs() -> Sample:
    return (torch.randn(8), torch.randn(6)), _label()


def _named_inputs() -> Sample:
    return {"left": torch.randn(8), "right": torch.randn(6), "scale": torch.rand(1)}, _label()


def _image_to_mask() -> Sample:
    image = torch.randn(3, 16, 16)
    return image, (image.mean(0, keepdim=True) > 0).float()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Next-token cross entropy: (batch, tokens, vocabulary) against (batch, tokens)."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def smooth_margin(output: Tensor, target: Tensor) -> Tensor:
    """A loss of our own, with indexing and broadcasting in it."""
    wanted = output.gather(1, target[:, None])
    margins = (1.0 + output - wanted).clamp(min=0) ** 2
    return margins.sum(1).mean() / 10 + 1e-3 * output.pow(2).mean()


def _dice(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output.sigmoid(), target)


def _by_name(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return cross_entropy(output["logits"], target) + 0.01 * output["penalty"].mean()


_ZOO: dict[str, _Entry] = {
    "mlp": _Entry(lambda: multilayer_perceptron(12, CLASSES), _vector),
    "cnn": _Entry(lambda: ConvNet(CLASSES), _image),
    "residual": _Entry(lambda: ResidualNet(CLASSES), _image),
    "unet": _Entry(UNet, _image_to_mask, _dice),
    "gpt": _Entry(lambda: TinyGPT(VOCABULARY, TOKENS), _plain_tokens, token_loss),
    "dropout": _Entry(lambda: multilayer_perceptron(12, CLASSES, dropout=0.2), _vector),
    "two_inputs": _Entry(lambda: TwoInputs(CLASSES), _two_inputs),
    "named_inputs": _Entry(lambda: NamedInputs(CLASSES), _named_inputs),
    "custom_loss": _Entry(lambda: multilayer_perceptron(12, CLASSES), _vector, smooth_margin),
    "frozen_layers": _Entry(lambda: frozen_layers(12, CLASSES), _vector),
    "frozen": _Entry(lambda: FrozenBackbone(CLASSES), _image),
    "inner_structures": _Entry(lambda: InnerStructures(CLASSES), _vector, _by_name),
}

_TRANSFORMER_DATA: dict[str, tuple[Callable[[], Sample], Callable[[Any, Any], Tensor]]] = {
    "image": (_large_image, lambda output, target: cross_entropy(output.logits, target)),
    "label": (_text_to_label, lambda output, target: cross_entropy(output.logits, target)),
    "tokens": (_tokens, lambda output, target: token_loss(output.logits, target)),
}

OWN = tuple(_ZOO)
"""Names that need nothing but torch."""

for _name, (_kind, _build) in TRANSFORMERS.items():
    _sample, _loss = _TRANSFORMER_DATA[_kind]
    _ZOO[_name] = _Entry(_build, _sample, _loss)

NAMES = tuple(_ZOO)
"""All names, transformers' models last."""


def make(
    name: str, *, samples: int = SAMPLES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Made:
    """The model `name` with `samples` samples, all of `dtype`; the global state is left alone."""
    entry = _ZOO[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = entry.model().to(dtype)
        data = cast([entry.sample() for _ in range(samples)], dtype)
    return Made(name, model, data, entry.loss)
