"""What `torch.no_grad()` in a forward() gives back has its gradient, or none, as in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import alpha_dropout, mse_loss

from tests.support import stage_pipeline, zoo
from tests.support.stage_pipeline import assert_same

WIDE = 6
ITSELF: Mapping[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(1),
    "real": lambda x: x.real,
    "positive": lambda x: +x,
    "at_least": lambda x: torch.atleast_2d(x),
    "broadcast": lambda x: torch.broadcast_tensors(x, x)[0],
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "conj_physical": lambda x: x.conj_physical(),
    "alpha_dropout": lambda x: alpha_dropout(x, 0.5, training=False),
}
"""They give x itself, where it has two dimensions and real numbers."""
VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1, 2, WIDE // 2),
    "unsqueezed": lambda x: x.unsqueeze(1),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "frozen": lambda x: (x + 1).view(-1, WIDE),
}


class _Three(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, WIDE)
        self.f = f


class _Looking(_Three):
    """The result is looked at; torch.export takes it for x from there on, where it is x itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            seen = self.f(x).abs().mean()
        out: Tensor = self.last(torch.tanh(self.second(x))) + seen
        return out


class _Going(_Three):
    """Training continues with the result."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            x = self.f(x)
        out: Tensor = self.last(torch.tanh(self.second(x.flatten(1))))
        return out


class _Beside(_Three):
    """Training continues with both, by the same last layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            y = self.f(x)
        out: Tensor = self.last(torch.tanh(self.second(y.flatten(1)))) + self.last(x)
        return out


class _Weights(_Three):
    """A weight's view is computed with, and a bias that is given back as it was."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            weight, bias = self.second.weight.view(WIDE, WIDE), self.second.bias.flatten(0)
        x = torch.tanh(nn.functional.linear(x, weight, bias))
        out: Tensor = self.last(self.second(x))
        return out


MODELS = {
    **{f"looking at {name}": (_Looking, f) for name, f in {**ITSELF, **VIEWS}.items()},
    **{f"going on with {name}": (_Going, f) for name, f in {**ITSELF, **VIEWS}.items()},
    **{f"{name} beside": (_Beside, f) for name, f in VIEWS.items()},
    "weights": (_Weights, torch.relu),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_flow_where_they_do_in_torch(name: str) -> None:
    """Wherever it is cut, in whole backwards and in split ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind, f = MODELS[name]
        samples = [(torch.randn(WIDE), torch.randn(WIDE)) for _ in range(stage_pipeline.BATCH)]
        made = zoo.Made(name, kind(f), samples, mse_loss)
    plain = stage_pipeline.plain_step(made)
    model = stage_pipeline.captured(made)
    units = len(model.description.units)
    for count in range(units):
        for cuts in combinations(range(1, units), count):
            for split in (False, True):
                found = stage_pipeline.pipeline_step(made, model, (0, *cuts, units), split=split)
                assert_same(plain, found)


class _Choosing(_Three):
    """Its choices are drawn: no more than zeros flow back through them."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.bernoulli(torch.sigmoid(self.first(x)))
        out: Tensor = self.last(torch.tanh(self.second(chosen)))
        return out


def test_zeros_that_flow_back_through_what_is_drawn_are_gradients() -> None:
    """Decay changes a weight that has them; one without a gradient is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        samples = [(torch.rand(WIDE), torch.randn(WIDE)) for _ in range(stage_pipeline.BATCH)]
        made = zoo.Made("choosing", _Choosing(torch.relu), samples, mse_loss)
    model = stage_pipeline.captured(made)
    units = len(model.description.units)
    found = stage_pipeline.pipeline_step(made, model, range(units + 1))
    gradient = found.gradients["first.weight"]
    assert gradient is not None
    assert not gradient.any()
    assert_same(stage_pipeline.pipeline_step(made, model, (0, units)), found)
