"""A metric that also finds the pictures whose label the network doubts most.

Those are where a wrong label, a blurred picture or a kind of picture that is missing shows first
(uncertainty sampling: Lewis and Gale, 1994). The page lists them, and a tap corrects a label.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2ptrain.errors import OptionError
from p2ptrain.events import Eval
from p2ptrain.logs import get_logger
from p2ptrain.photos.picture import is_picture_name
from p2ptrain.photos.uncertain import (
    UNCERTAIN_LIMIT,
    UncertainPicture,
    UncertainPictures,
    write_uncertain,
)

log = get_logger(__name__)


class LeastCertain:
    """Give it to a job twice: as a metric, which looks, and as a callback, which writes.

        doubts = p2ptrain.photos.LeastCertain(test, "photos")
        Job(..., eval_data=test, metrics={"sure": doubts}, callbacks=[doubts])

    The metric's value is the mean probability that the network gives to a picture's own label.
    After each evaluation `uncertain.json` in the folder has those with the least.
    """

    def __init__(self, dataset: Any, folder: str | os.PathLike[str], count: int = 24) -> None:
        """Look at one folder.

        Args:
            dataset: the job's `eval_data`, or the dataset of its loader, in the loader's order: it
                has `classes` and `samples` (path, class) as torchvision's ImageFolder, or is a
                torch.utils.data.Subset of one that has.
            folder: the pictures' folder: label/file.jpg.
            count: so many are kept.

        Raises:
            OptionError: the dataset does not say which file a sample is.
        """
        if not isinstance(count, int) or not 1 <= count <= UNCERTAIN_LIMIT:
            raise OptionError(f"count is 1 to {UNCERTAIN_LIMIT}, not {count!r}")
        self._folder = Path(folder).expanduser().resolve()
        self._classes, self._paths = _pictures_of(dataset)
        self._count = count
        self._sure: list[float] = []
        self._guesses: list[int] = []
        self._found: tuple[list[float], list[int]] | None = None  # of an evaluation that is whole

    def reset(self) -> None:
        """An evaluation begins."""
        self._sure, self._guesses = [], []

    def update(self, output: Any, target: Tensor) -> None:
        """The next samples: logits (n, classes), and their classes (n,)."""
        logits = _logits(output).detach().float()
        if logits.dim() != 2 or target.shape != logits.shape[:1]:
            raise OptionError(
                "LeastCertain takes logits (n, classes) and classes (n,), not "
                f"{tuple(logits.shape)} and {tuple(target.shape)}"
            )
        probabilities = logits.softmax(1).nan_to_num(0.0)  # of a training that has diverged
        self._sure += probabilities.gather(1, target.long().unsqueeze(1)).squeeze(1).tolist()
        self._guesses += probabilities.argmax(1).tolist()

    def compute(self) -> float:
        """The mean probability of the pictures' own labels; NaN without pictures."""
        is_whole = len(self._sure) == len(self._paths)
        self._found = (self._sure, self._guesses) if is_whole else None
        return sum(self._sure) / len(self._sure) if self._sure else float("nan")

    def on_eval(self, event: Eval) -> None:
        """Write what was found. A disk that refuses it ends no training."""
        if self._found is None:
            log.warning(
                "least_certain_not_written", why="the evaluation did not give it all pictures"
            )
            return
        sure, guesses = self._found
        shown = (n for n, path in enumerate(self._paths) if self._is_shown(path))
        doubted = heapq.nsmallest(self._count, shown, key=sure.__getitem__)
        pictures = tuple(
            UncertainPicture(path.parent.name, path.name, self._label(guess), min(likely, 1.0))
            for path, guess, likely in ((self._paths[n], guesses[n], sure[n]) for n in doubted)
        )
        try:
            write_uncertain(self._folder, UncertainPictures(event.step, len(sure), pictures))
        except OSError as error:
            log.warning("least_certain_not_written", why=str(error))

    def _is_shown(self, path: Path) -> bool:
        """Whether it lies where the page looks."""
        label = path.parent
        is_here = label.parent == self._folder and label.name.isprintable()
        return is_here and is_picture_name(path.name)

    def _label(self, number: int) -> str:
        known = number < len(self._classes)
        return str(self._classes[number]) if known else f"class {number}"


def _pictures_of(dataset: Any) -> tuple[list[Any], list[Path]]:
    """Its classes, and its files, their folders as they really are."""
    if isinstance(dataset, torch.utils.data.Subset):
        classes, paths = _pictures_of(dataset.dataset)
        return classes, [paths[index] for index in dataset.indices]
    try:
        samples = [os.path.split(path) for path, *_ in dataset.samples]
        classes = list(dataset.classes)
    except (AttributeError, TypeError, ValueError):
        raise OptionError(
            "LeastCertain needs to know each sample's file: give it a dataset with `classes` and "
            f"`samples` (path, class), as ImageFolder has them, not {type(dataset).__name__}"
        ) from None
    folders = {folder: Path(folder).resolve() for folder in {folder for folder, _ in samples}}
    return classes, [folders[folder] / name for folder, name in samples]


def _logits(output: Any) -> Tensor:
    """Of a model's output: a tensor, or what transformers' models return."""
    found = output.get("logits") if isinstance(output, Mapping) else output
    found = getattr(found, "logits", found)
    if not isinstance(found, Tensor):
        raise OptionError(f"LeastCertain takes logits as a tensor, not {type(found).__name__}")
    return found
