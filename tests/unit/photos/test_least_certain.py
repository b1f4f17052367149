"""The metric that finds the pictures whose label a network doubts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Subset

from p2ptrain.errors import OptionError
from p2ptrain.events import Eval
from p2ptrain.photos import LeastCertain


class _Pictures(torch.utils.data.Dataset):
    """As torchvision's ImageFolder: `classes` and `samples`."""

    def __init__(self, folder: Path, labels: list[int]) -> None:
        self.classes = ["apples", "pears"]
        self.samples = [
            (str(folder / self.classes[label] / f"{number}.jpg"), label)
            for number, label in enumerate(labels)
        ]


LABELS = [0, 1, 0, 1]
SURE = torch.tensor([0.9, 0.2, 0.6, 0.4])


def _logits(sure: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of a network that finds each label that likely."""
    likely = torch.stack([1 - sure, sure], 1)
    return torch.where(labels.bool().unsqueeze(1), likely, likely.flip(1)).log()


def _written(folder: Path) -> list[tuple[str, str, float]]:
    found = json.loads((folder / "uncertain.json").read_text())
    return [(p["file"], p["guess"], round(p["sure"], 3)) for p in found["pictures"]]


def test_the_least_likely_labels_are_written_after_an_evaluation(tmp_path: Path) -> None:
    labels = torch.tensor(LABELS)
    doubts = LeastCertain(_Pictures(tmp_path, LABELS), tmp_path, count=3)
    output = _logits(SURE, labels)
    for _ in range(2):  # the second evaluation replaces the first
        doubts.reset()
        doubts.update(output[:3], labels[:3])
        doubts.update({"logits": output[3:]}, labels[3:])
        assert doubts.compute() == pytest.approx(SURE.mean().item())
        doubts.on_eval(Eval(5, {}))
    expected = [("1.jpg", "apples", 0.2), ("3.jpg", "apples", 0.4), ("2.jpg", "apples", 0.6)]
    assert _written(tmp_path) == expected
    assert sorted(place.name for place in tmp_path.iterdir()) == ["uncertain.json"]


def test_a_part_of_a_folder_and_pictures_elsewhere(tmp_path: Path) -> None:
    labels = torch.tensor(LABELS)
    whole = _Pictures(tmp_path, LABELS)
    whole.samples[3] = (str(tmp_path.parent / "pears" / "3.jpg"), 1)
    doubts = LeastCertain(Subset(whole, [3, 2, 1]), tmp_path)
    doubts.reset()
    doubts.update(_logits(SURE, labels)[[3, 2, 1]], labels[[3, 2, 1]])
    doubts.compute()
    doubts.on_eval(Eval(5, {}))
    assert [name for name, *_ in _written(tmp_path)] == ["1.jpg", "2.jpg"]


def test_what_cannot_be_named_is_refused_and_what_is_not_whole_is_not_written(
    tmp_path: Path,
) -> None:
    for count in (0, 201, "3"):
        with pytest.raises(OptionError, match="count is 1 to 200"):
            LeastCertain(_Pictures(tmp_path, LABELS), tmp_path, count)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="as ImageFolder has them, not SimpleNamespace"):
        LeastCertain(SimpleNamespace(samples=[1]), tmp_path)
    doubts = LeastCertain(_Pictures(tmp_path, LABELS), tmp_path)
    with pytest.raises(OptionError, match="takes logits"):
        doubts.update(torch.zeros(4), torch.zeros(4))
    doubts.reset()
    doubts.update(torch.full((2, 2), torch.nan), torch.tensor([0, 1]))
    assert doubts.compute() == 0.0  # of a training that has diverged
    doubts.on_eval(Eval(5, {}))
    assert not (tmp_path / "uncertain.json").exists()
    doubts = LeastCertain(_Pictures(tmp_path, LABELS), tmp_path / "gone")
    doubts.update(torch.zeros(4, 2), torch.tensor(LABELS))
    doubts.compute()
    doubts.on_eval(Eval(5, {}))  # a disk that refuses ends no training
