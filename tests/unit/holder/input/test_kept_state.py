"""What a data set keeps is compared: what changes is seen, and usual data sets are looked into."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from p2ptrain.holder.input.kept_state import KeptState

counter = [0]


class Folder(Dataset[Any]):
    """As torchvision's: paths, a transform, a cache of nothing yet."""

    sizes: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.samples = [(f"picture {k}.png", k % 3) for k in range(20_000)]
        self.root = Path("/data")
        self.table = numpy.arange(12.0)
        self.weights = torch.arange(3.0)
        self.transform: Callable[[Any], Any] = lambda x: x * scale[0]
        self.draw = random.Random(1)
        self.lock = threading.Lock()
        self.nested = {"a": [TensorDataset(torch.ones(3, 2))]}

    def __getitem__(self, index: int) -> Any:
        counter[0] += index
        return self.transform(index)


scale = [2]


def _in_a_class(_: Folder) -> None:
    Folder.sizes["seen"] = Folder.sizes.get("seen", 0) + 1


CHANGES: dict[str, Callable[[Folder], object]] = {
    "an attribute": lambda data: setattr(data, "epoch", 1),
    "one of many samples": lambda data: data.samples.__setitem__(15_000, ("other.png", 1)),
    "an array": lambda data: data.table.__setitem__(3, 0.5),
    "a tensor": lambda data: data.weights.add_(1),
    "a generator": lambda data: data.draw.random(),
    "a global": lambda data: counter.__setitem__(0, counter[0] + 1),
    "what a function reads": lambda data: scale.append(1),
    "a class": _in_a_class,
    "something nested": lambda data: data.nested["a"][0].tensors[0].zero_(),
    "a transform": lambda data: setattr(data, "transform", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    data = Folder()
    kept = KeptState(data, default_collate)
    assert kept.is_unchanged()
    CHANGES[change](data)
    assert not kept.is_unchanged()


def test_what_cannot_be_looked_into_counts_as_changed() -> None:
    class Reads(Folder):
        def __init__(self) -> None:
            super().__init__()
            self.lines = (line for line in "abc")

    assert not KeptState(Reads()).is_unchanged()


def test_reading_leaves_usual_data_sets_as_they_are() -> None:
    table = TensorDataset(torch.randn(9, 2), torch.arange(9))
    data = ConcatDataset([Subset(table, [0, 2, 4]), table])
    kept = KeptState(data, default_collate, None)
    default_collate([data[index] for index in range(len(data))])
    assert kept.is_unchanged()
