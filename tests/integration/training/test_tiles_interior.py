"""Devices that compute a convolution's interior while halos travel train as plain torch does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.model.tiles.interior import InteriorFirst
from p2ptrain.observe.events import Eval
from p2ptrain.tiles.shape import TileShape
from p2ptrain.training.job import SGD, Job
from tests import reference
from tests.curves import by_plain_torch, difference
from tests.integration.training.household import devices
from tests.integration.training.test_tiles import TOLERANCE, forced, trained

CHANNELS, STEPS = 8, 5


class Block(nn.Module):
    """Two convolutions and what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding="same", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same size."""
        return x + self.second(torch.tanh(self.first(x)))


def job() -> Job:
    """Nothing normalises; tiles of 42 x 44 positions have less than a twentieth in their strips."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        layers = [nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.ReLU(inplace=True))]
        pooled = nn.Sequential(Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model = nn.Sequential(*layers, Block(), pooled, nn.Linear(CHANNELS, 5)).double()
        data = [(torch.randn(3, 84, 88).double(), torch.randint(5, ())) for _ in range(8)]
    return Job(
        model=model,
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=SGD(lr=0.05, momentum=0.9),
        batch_size=4,
        micro_batch=2,
        epochs=1000,
        seed=3,
    )


@pytest.mark.parametrize(
    ("shape", "shares"),
    [
        (TileShape((1.0,), (0.5, 0.5), (0, 1, 2), interiors=(1,)), (1, 1)),
        (TileShape((0.5, 0.5), (0.5, 0.5), (0, 1, 2), interiors=(1,)), (3, 1)),
        (TileShape((0.5, 0.5), (0.5, 0.5), (0, 1, 2), interiors=(1,)), (1, 1, 1, 1)),
    ],
    ids=["1x2", "2x2 on two devices", "2x2"],
)
async def test_interiors_are_computed_while_halos_travel(
    monkeypatch: pytest.MonkeyPatch, shape: TileShape, shares: tuple[int, ...]
) -> None:
    """In training and in an evaluation."""
    calls: Counter[str] = Counter()
    begin, finish = InteriorFirst.begin, InteriorFirst.finish

    def begun(self: InteriorFirst, owned: Tensor) -> Tensor:
        calls["begun"] += 1
        return begin(self, owned)

    def finished(self: InteriorFirst, made: Tensor, whole: Tensor) -> None:
        calls["finished"] += 1
        finish(self, made, whole)

    monkeypatch.setattr(InteriorFirst, "begin", begun)
    monkeypatch.setattr(InteriorFirst, "finish", finished)
    forced(monkeypatch, shape, shares, behind="a")
    what = job()
    evaluated = what.data[:3]  # type: ignore[index]
    async with devices(len(shares)) as household:
        ours = await trained(household, replace(what, eval_data=evaluated), STEPS)
    found = difference(ours, by_plain_torch(job(), STEPS))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE
    *_, told = [event for event in household.events if isinstance(event, Eval)]
    inputs, targets = reference.stack(evaluated)
    assert isinstance(what.model, nn.Module)
    with torch.no_grad():
        expected = what.loss(reference.call(what.model, inputs), targets).item()
    assert told.metrics["loss"] == pytest.approx(expected, abs=1e-9)
    tiles, micro_batches = sum(shares), 2 * STEPS
    assert calls["begun"] == calls["finished"] > tiles * micro_batches  # those of evaluations too
