"""What is normalised and never used has statistics, and no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.model.capture.capture import capture
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.split_model import cut_where_tiling_ends
from tests.support.tiled_training import Prepared, compare, train_plainly, train_tiled


class Branches(nn.Module):
    """One that nobody reads, between two convolutions that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.dead = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2), nn.BatchNorm2d(5)
        )
        self.last = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Tanh())
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.dead(x)
        out: Tensor = self.head(self.last(x).mean((2, 3)))
        return out


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    torch.manual_seed(0)
    module = Branches().double()
    shape = (2, 3, 14, 15)
    batches = [(torch.randn(shape, dtype=torch.float64), torch.tensor([1, 3])) for _ in range(2)]
    captured = capture(module, functional.cross_entropy, batches[0], evaluation=False)
    description, part = cut_where_tiling_ends(captured.description)
    return Prepared("branches", module, captured, description, part, batches)


@pytest.mark.parametrize("joined", [False, True])
def test_what_nobody_reads_gets_no_gradient(prepared: Prepared, joined: bool) -> None:
    """A gradient of zeros is not none: an optimizer would still decay those weights."""
    part = prepared.part
    units = len(part.network.units)
    borders = (0, units) if joined else range(units + 1)
    layout = GridLayout(part.network, ((1.0, 1.2), (1.0, 1.0)), borders)
    run, same = train_tiled(prepared, layout, range(4))
    plain = train_plainly(prepared)
    assert run.gradients.keys() == plain.gradients.keys()
    assert not any(name.startswith("dead.") for name in run.gradients)
    apart = compare(plain, run, same)
    assert max(apart.losses, apart.gradients, apart.buffers) < 1e-10
    assert apart.replicas
