"""What forward() and the loss read in Python is watched, wherever it is kept."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.model.tracing.python_state import Outdated

SCALE = 1.0
TABLE = {"scale": 1.0}
CONSTANT = torch.ones(2)
UNREAD = 0
settings = ModuleType("settings")
settings.scale = 1.0  # type: ignore[attr-defined]


class Config:
    scale = 1.0


def scale() -> float:
    return SCALE


class Net(nn.Module):
    factor = 1.0

    def __init__(self, box: SimpleNamespace) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.power, self.box = 1.0, box

    @property
    def both(self) -> float:
        return scale() * TABLE["scale"] * Config.scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.both * CONSTANT
        return y * float(settings.scale) * self.power * float(self.box.scale) * self.factor


def loss_with(margin: float) -> tuple[Callable[[Any, Any], Tensor], Callable[[], None]]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean() * margin

    def change() -> None:
        nonlocal margin
        margin = 2.0

    return loss, change


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("global", "SCALE"),
        ("entry", "TABLE.scale"),
        ("tensor", "CONSTANT"),
        ("module", "settings.scale"),
        ("class", "Config.scale"),
        ("own_class", "Net.factor"),
        ("attribute", "power"),
        ("object", "box.scale"),
        ("closure", "loss.margin"),
    ],
)
def test_a_change_is_named_once(where: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, (loss, change_margin) = Net(SimpleNamespace(scale=1.0)), loss_with(1.0)
    watched = Outdated(net, loss)
    assert watched.news() == []
    here = globals()
    changes: dict[str, Callable[[], object]] = {
        "global": lambda: monkeypatch.setitem(here, "SCALE", 2.0),
        "entry": lambda: monkeypatch.setitem(TABLE, "scale", 2.0),
        "tensor": lambda: CONSTANT.fill_(2.0),
        "module": lambda: monkeypatch.setattr(settings, "scale", 2.0),
        "class": lambda: monkeypatch.setattr(Config, "scale", 2.0),
        "own_class": lambda: monkeypatch.setattr(Net, "factor", 2.0),
        "attribute": lambda: setattr(net, "power", 2.0),
        "object": lambda: setattr(net.box, "scale", 2.0),
        "closure": change_margin,
    }
    changes[where]()
    assert watched.news() == [name]
    assert watched.news() == []


def test_what_training_and_others_change_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(SimpleNamespace(scale=1.0))
    watched = Outdated(net, loss_with(1.0)[0])
    monkeypatch.setitem(globals(), "UNREAD", 1)
    with torch.no_grad():
        net.layer.weight.add_(1.0)
    net(net.norm(torch.ones(3, 2))).sum().backward()
    net.eval()
    assert watched.news() == []
