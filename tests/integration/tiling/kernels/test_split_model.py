"""A whole model with the cut where tiling ends: it travels, trains and evaluates as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.decoding import decode_model
from p2ptrain.model.stage.stage import Stage
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.read_tiled_part import read_tiled_part
from p2ptrain.tiling.kernels.split_model import cut_where_tiling_ends
from p2ptrain.tiling.kernels.tileable_operators import NotTiled
from tests.support.tiling_in_process import Tiles


class Small(nn.Module):
    """Ends with a convolution, a normalisation and a pooling in one unit; dropout behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.second(torch.relu(self.first(x)))), inplace=True)
        out: Tensor = self.head(functional.adaptive_avg_pool2d(x, 1))
        return out


class WritesToAView(nn.Module):
    """A common way to end a convolutional part: the activation changes the map itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3))
        self.head = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(360, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class WritesToAPart(WritesToAView):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        x[:, :2] *= 0.5
        out: Tensor = self.head(x)
        return out


class CountsPasses(WritesToAView):
    """What is counted in front is read behind: a warm-up."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out: Tensor = self.head(self.body(x)) * torch.clamp(self.passes / 4, max=1.0)
        return out


class ReadsRunningStatistics(WritesToAView):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[2](torch.relu(self.norm(self.body[0](x))))
        assert self.norm.running_mean is not None
        out: Tensor = self.head(x) * (1 + self.norm.running_mean.square().sum())
        return out


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    return Small()


@pytest.fixture(scope="module")
def captured(model: nn.Module) -> Captured:
    batch = torch.randn(3, 3, 14, 10), torch.tensor([0, 2, 1])
    return capture(model, functional.cross_entropy, batch)


def test_the_cut_model_travels(captured: Captured) -> None:
    description, part = cut_where_tiling_ends(captured.description)
    names = [unit.name for unit in captured.description.units]
    assert len(description.units) == len(names) + 1
    assert part.whole == len(part.network.units)
    assert decode_model(description.to_bytes()) == description


def test_the_cut_model_draws_the_same_masks(captured: Captured) -> None:
    """A job that may be tiled has the losses of one that may not."""
    cut, _ = cut_where_tiling_ends(captured.description)
    x, y = torch.randn(5, 3, 14, 10), torch.tensor([0, 1, 2, 0, 1])
    losses = [
        Stage(description, 0, len(description.units), captured.state()).forward(
            0, [x], [y], seed=(7, 1, 2)
        )
        for description in (captured.description, cut)
    ]
    assert torch.equal(losses[0][0], losses[1][0])


def test_evaluation_in_tiles(model: nn.Module, captured: Captured) -> None:
    description, _ = cut_where_tiling_ends(captured.description)
    part = read_tiled_part(description, "eval", whole_units=True)
    layout = GridLayout(part.network, ([1.0, 1.0], [2.0, 1.0]), (0, len(part.network.units)))
    states = [captured.state() for _ in range(4)]
    tiles = Tiles(description, part, layout, states)
    x, y = torch.randn(5, 3, 14, 10), torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(x)
    tail = Stage(description, part.whole, len(description.units), captured.state())
    loss, output = tail.evaluate(tiles.forward(0, [x]), [y])
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, functional.cross_entropy(expected, y))
    assert not tiles.traffic  # one group, and no statistics
    assert all(p.grad is None for r in tiles.replicas for p in r.values())


@pytest.mark.parametrize(
    "made", [WritesToAView, WritesToAPart, CountsPasses, ReadsRunningStatistics]
)
def test_units_on_two_devices_share_no_memory_that_is_written(made: type[nn.Module]) -> None:
    """Whatever border there is now, each side has tensors of its own."""
    torch.manual_seed(1)
    model, x, y = made(), torch.randn(5, 3, 14, 10), torch.tensor([0, 1, 2, 0, 1])
    captured = capture(model, functional.cross_entropy, (x, y), evaluation=False)
    try:
        description, _ = cut_where_tiling_ends(captured.description)
    except NotTiled:
        description = captured.description  # that is what trains then
    state = {name: tensor.clone() for name, tensor in captured.state().items()}
    wanted = [functional.cross_entropy(model(x), y) for _ in range(2)]
    count = len(description.units)
    for border in range(1, count):
        front = Stage(description, 0, border, copy.deepcopy(state))
        behind = Stage(description, border, count, copy.deepcopy(state))
        for number, loss in enumerate(wanted):
            crossing = front.forward(number, [x], [], seed=(7, 1, number))
            (reached,) = behind.forward(number, crossing, [y], seed=(7, 1, number))
            torch.testing.assert_close(reached, loss.detach(), rtol=0, atol=0)
