"""What people's modules are made of, trained on several devices, bit for bit as plain torch does.

The stages alone are tested in tests/integration/model; here everything runs, from the user's data
set to the weights in the user's own module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from p2ptrain.events import Eval
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from tests.integration.training.household import devices
from tests.support import reference
from tests.support.model_idioms import Complex, Packed

SGD_ARGUMENTS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(20, 8, mode="mean")
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 4, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Any:
        hidden, _ = self.lstm(self.words(tokens))
        both, _ = self.gru(hidden)
        return self.out(torch.cat([both[:, -1], self.bag(tokens)], 1))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.heads = nn.Parameter(torch.randn(12, 2, 6) * 0.3)
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.encoder(x, mask=mask, is_causal=True)
        x = x + self.attention(x, x, x)[0]
        split = torch.einsum("btd,dhk->bhtk", x, self.heads)
        scores = torch.einsum("bhtk,bhsk->bhts", split, split)
        later = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ split
        where = torch.arange(x.shape[1]) * 0.01
        return self.out((mixed.transpose(1, 2).flatten(2) + where[:, None]).mean(1))


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv3d(1, 4, (3, 3, 3), padding=(0, 1, 1)),
        nn.BatchNorm3d(4),
        nn.Flatten(1, 2),
        nn.PReLU(4),
        nn.ConvTranspose2d(4, 6, 2, stride=2),
        nn.InstanceNorm2d(6, affine=True),
        nn.Upsample(scale_factor=0.5, mode="bilinear"),
        nn.GroupNorm(2, 6),
        nn.Flatten(2),
        nn.Conv1d(6, 4, 3, padding=1),
        nn.Hardswish(inplace=True),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    )


class Stateful(nn.Module):
    mean: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(12, 12))
        self.shared = nn.Linear(12, 12)
        self.bounded = spectral_norm(nn.Linear(12, 12))
        self.unused = nn.Linear(3, 3)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(12)) for _ in range(2)])
        self.out = nn.Linear(12, 4)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("scratch", torch.ones(12), persistent=False)
        self.shared.bias.requires_grad = False
        self.eval()

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.first(x)) * self.scales[0]
        x = torch.tanh(self.shared(x))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x = torch.tanh(self.shared(x - self.mean)) * self.scales[1] * self.scratch
        return self.out(self.bounded(x))


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Embedding(5, 8)
        self.vector = nn.Linear(6, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, kind: Tensor, values: Tensor, mask: Tensor | None = None) -> Any:
        hidden = self.number(kind) + torch.relu(self.vector(values.float()))
        if mask is not None:
            hidden = torch.where(mask, hidden, 0.0)
        return {"logits": self.out(hidden), "hidden": (hidden, None)}


def structured_loss(output: Any, target: Any) -> Tensor:
    """Ignores a part of the target."""
    return cross_entropy(output["logits"], target["label"]) + output["hidden"][0].pow(2).mean()


class Parts(NamedTuple):
    one: Any
    other: Any


class Named(nn.Module):
    """Reads its input, and gives its output, by the names of fields."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, both: Any) -> Any:
        return Parts(self.out(torch.tanh(self.first(both.one + both.other))), both.one)


def named_loss(output: Any, target: Any) -> Tensor:
    return cross_entropy(output.one, target.one) + cross_entropy(output.one, target.other)


def pairs_loss(output: Tensor, target: Tensor) -> Tensor:
    """Each sample's target among those of all others, partly in half the bits."""
    with torch.autocast("cpu"):
        similar = output @ target.T
    return cross_entropy(similar.float(), torch.arange(len(output)))


class Unrecorded(nn.Module):
    """What `torch.no_grad()` does not record, but gives back as it was, keeps its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.cast, self.clamped = nn.Linear(12, 12), nn.Linear(12, 12)
        self.dropped, self.out = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.cast(x))
        with torch.no_grad():
            x = x.float()
        x = self.clamped(x)
        with torch.no_grad():
            x.clamp_(-1, 1)
        x = self.dropped(x)
        with torch.no_grad():
            x = nn.functional.dropout(x, 0.5, training=False)
        return self.out(x)


def layers(dtype: torch.dtype) -> nn.Module:
    parts = (nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))
    return nn.Sequential(*parts).to(dtype)


def label() -> Tensor:
    return torch.randint(4, ())


@dataclass(frozen=True)
class Example:
    model: Callable[[], nn.Module]
    sample: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor] = cross_entropy


EXAMPLES = {
    "recurrent": Example(Recurrent, lambda: (torch.randint(20, (4,)), label())),
    "attentive": Example(Attentive, lambda: (torch.randn(5, 12), label())),
    "packed": Example(
        lambda: Packed(nn.LSTM, "last", True, False, num_layers=2),
        lambda: ((torch.randint(12, (6,)), int(numpy.random.randint(1, 7))), torch.randn(8)),
        mse_loss,
    ),
    "complex": Example(Complex, lambda: (torch.randn(6, 8), torch.randn(8)), mse_loss),
    "pairs": Example(
        lambda: layers(torch.float32), lambda: (torch.randn(12), torch.randn(4)), pairs_loss
    ),
    "volumes": Example(volumes, lambda: (torch.randn(3, 8, 8), label())),
    "stateful": Example(Stateful, lambda: (torch.randn(12), label())),
    "unrecorded": Example(Unrecorded, lambda: (torch.randn(12), label())),
    "structured": Example(
        Structured,
        lambda: (
            {
                "values": numpy.random.randn(6),
                "kind": int(numpy.random.randint(5)),
                "mask": torch.ones(8, dtype=torch.bool),
            },
            {"label": label(), "unused": 0.5, "more": (torch.zeros(2),)},
        ),
        structured_loss,
    ),
    "named": Example(
        Named,
        lambda: ({"both": Parts(torch.randn(6), torch.randn(6))}, Parts(label(), label())),
        named_loss,
    ),
    "positional": Example(
        lambda: nn.Bilinear(5, 6, 3),
        lambda: ((torch.randn(5), torch.randn(6)), torch.randn(3)),
        mse_loss,
    ),
    "float64": Example(
        lambda: layers(torch.float64), lambda: (torch.randn(12, dtype=torch.float64), label())
    ),
    "bfloat16": Example(
        lambda: layers(torch.bfloat16), lambda: (torch.randn(12, dtype=torch.bfloat16), label())
    ),
}


def make(example: Example) -> tuple[nn.Module, list[tuple[Any, Any]]]:
    torch.manual_seed(0)
    numpy.random.seed(0)
    return example.model(), [example.sample() for _ in range(24)]


def as_tensors(value: Any) -> Any:
    """What the data set gives as the plain loop can stack it."""
    if isinstance(value, Parts):
        return Parts(*map(as_tensors, value))
    if isinstance(value, tuple):
        return tuple(map(as_tensors, value))
    if isinstance(value, dict):
        return {key: as_tensors(item) for key, item in value.items()}
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


@pytest.mark.parametrize("name", EXAMPLES)
async def test_it_trains_as_plain_torch_does(name: str) -> None:
    example = EXAMPLES[name]
    model, data = make(example)
    job = Job(
        model=model,
        data=data,
        loss=example.loss,
        optimizer=SGD(**SGD_ARGUMENTS),  # type: ignore[arg-type]
        batch_size=12,
        micro_batch=5,  # 5 + 5 + 2
        epochs=2,
    )
    count = 1 if name == "positional" else 2
    async with devices(count) as household:
        await household.holder_run(job, TrainOptions(wait_for=count, planner="pp")).run()
        placed = {name for stage in household.plan.stages for name in stage.parameters}
        losses = household.losses
    assert placed == set(model.state_dict())

    plain, data = make(example)
    recipe = reference.Recipe(
        lambda parameters: torch.optim.SGD(parameters, **SGD_ARGUMENTS),  # type: ignore[arg-type]
        batch_size=12,
        micro_batch=5,
        epochs=2,
    )
    outcome = reference.train(plain, [as_tensors(pair) for pair in data], example.loss, recipe)
    assert losses == outcome.losses
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, outcome.state_dict[key]), key


async def test_metrics_get_outputs_and_targets_with_the_names_of_their_fields() -> None:
    example = EXAMPLES["named"]
    model, data = make(example)

    def score(output: Any, target: Any) -> Tensor:
        return output.other.mean() + target.one.float().mean() - target.other.float().mean()

    job = Job(
        model=model,
        data=data,
        loss=example.loss,
        optimizer=SGD(lr=0.05),
        batch_size=12,
        eval_data=data,
        metrics={"score": score},
    )
    async with devices(2) as household:
        await household.holder_run(job).run()
        (evaluated,) = [event for event in household.events if isinstance(event, Eval)]
    x, y = reference.stack(data)
    expected = float(score(Parts(None, x["both"].one), y))
    assert evaluated.metrics["score"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
