"""Who trains one job after the other keeps nothing of those before."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import cross_entropy

from p2ptrain.errors import Error
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.stage.result_sizes import needs_of

EXAMPLE = (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))


class _Branching(nn.Linear):
    """Decides by a number, which no graph can."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def _captured() -> None:
    capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), cross_entropy, EXAMPLE)


def _sized() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    needs_of(capture(model, cross_entropy, EXAMPLE).description, 0, 1, "train", 4)


def _refused() -> None:
    with pytest.raises(Error):
        capture(_Branching(4, 4), cross_entropy, EXAMPLE)


def _kept() -> tuple[int, ...]:
    for _ in range(3):  # a round frees tensors, and what their sizes held goes with the next
        gc.collect()
    environments = sum(type(thing) is ShapeEnv for thing in gc.get_objects())
    sources = sum(name.startswith("<eval_with_key>") for name in linecache.cache)
    tensors = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
    return environments, len(FakeTensorMode.cache), sources, tensors


@pytest.mark.parametrize("once", [_captured, _sized, _refused])
def test_torch_keeps_nothing_of_a_model_that_was_traced(once: Callable[[], None]) -> None:
    once()
    before = _kept()
    once()
    assert _kept() == before
