"""A block's time is what lies between its border and the next one's, both ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tools.bench.worker import blocks
from tools.bench.worker.blocks import Course


def run(course: Course, model: nn.Module) -> list[float]:
    course.begin()
    model(torch.ones(2, 3)).sum().backward()
    return course.seconds()


def test_the_blocks_times_add_up_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1))
    course = Course(model, ["0", "2", "3"])
    ticks = iter(range(100))
    monkeypatch.setattr(blocks, "thread_time", lambda: float(next(ticks)))
    # Ticks: forward comes to 0, 2, 3 at 0, 1, 2; backward leaves 3, 2 at 3, 4; it ends at 5.
    assert run(course, model) == [2.0, 2.0, 1.0]
    assert run(course, model) == [2.0, 2.0, 1.0], "the second run counts for itself"


def test_every_model_has_blocks_to_cut_at() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Linear(1, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = nn.Module()
            self.vit.embeddings = nn.Linear(1, 1)
            self.vit.layers = nn.ModuleList([Layer(), Layer()])
            self.classifier = nn.Linear(1, 1)

    expected = ["vit.embeddings", "vit.layers.0", "vit.layers.1", "classifier"]
    assert blocks.names("vit", Model()) == expected
