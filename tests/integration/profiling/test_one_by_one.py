from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.profiling.measure_units import units_faster_with_onednn


def described(*layers: nn.Module, dtype: torch.dtype = torch.float32) -> ModelDescription:
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))
    batch = torch.randn(2, 64, 8, 8, dtype=dtype), torch.tensor([0, 1])
    model.to(dtype)
    return capture(model, nn.functional.cross_entropy, batch, evaluation=False).description


def one_by_one(**options: int) -> nn.Module:
    return nn.Conv2d(64, 64, 1, **options)


def three_by_three() -> nn.Module:
    return nn.Conv2d(64, 64, 3, padding=1)


def names(description: ModelDescription, threads: int = 1) -> set[str]:
    return {description.units[unit].name for unit in units_faster_with_onednn(description, threads)}


def test_units_with_convolutions_of_one_position_are_found() -> None:
    description = described(three_by_three(), one_by_one(), three_by_three(), one_by_one())
    assert names(description) == {"1", "3"}


def test_with_several_threads_torch_computes_all_by_one_library() -> None:
    assert names(described(one_by_one()), threads=2) == set()


@pytest.mark.parametrize(
    "layers",
    [
        (three_by_three(),),
        (one_by_one(stride=2),),
        (one_by_one(groups=4),),
        (one_by_one(dilation=2),),
        (three_by_three(), three_by_three(), one_by_one(), three_by_three()),
    ],
    ids=["larger kernel", "stride", "groups", "dilation", "a small part of the model"],
)
def test_other_models_change_nowhere(layers: tuple[nn.Module, ...]) -> None:
    assert names(described(*layers)) == set()


def test_other_element_types_change_nowhere() -> None:
    assert names(described(one_by_one(), dtype=torch.float64)) == set()


class Signal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(16, 32, 1)
        self.out = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.mix(x).mean(2))
        return result


def test_convolutions_over_time_are_found_too() -> None:
    batch = torch.randn(2, 16, 100), torch.tensor([0, 1])
    captured = capture(Signal(), nn.functional.cross_entropy, batch, evaluation=False)
    assert "mix" in names(captured.description)
