"""The loaders of a LightningModule, a LightningDataModule, or given as they are.

While they are asked for, `self.trainer` says what is known before the training, and stays."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from p2ptrain.errors import ScriptError
from p2ptrain.job.data_kinds import updates_in
from p2ptrain.lightning.refusals import lightning_base, place_of, refuse_hooks, refused

BATCH = "batch"
"""Under which a TrainingStep is given a batch, whatever it is."""


@dataclass(frozen=True, slots=True)
class FoundLoaders:
    """What is trained and validated on.

    Attributes:
        train: a loader of mini-batches, each under `BATCH`.
        updates: of one epoch; None where the data does not say.
        validation: as the user has it; None: there is none, or nothing is done with it.
    """

    train: Any
    updates: int | None
    validation: Any


def prepared_loaders(
    module: Any, data: Any, validation: Any, base: type, trainer: TrainerFacts
) -> FoundLoaders:
    """Prepare module and data as Lightning does before it fits.

    Args:
        data: a LightningDataModule, a loader, or None: the module has it.
        validation: a loader, or several; None: data or the module have it.
        base: Lightning's own LightningModule.

    Raises:
        ScriptError: there is no loader, or several to train on.
    """
    data_base = lightning_base(data, "LightningDataModule")
    datamodule = None if data_base is None else data
    if data_base is not None:
        refuse_hooks(data, data_base)
    with attached(trainer, datamodule, module):
        for one in (datamodule, module):
            if one is not None:
                one.prepare_data()
        for one in (datamodule, module):
            if one is not None:
                one.setup("fit")
        module.configure_model()
        source = module if data is None else datamodule
        source_base = base if data is None else data_base
        train = data
        if source is not None:
            train = _asked(source, source_base, "train_dataloader")
        if validation is None and source is not None:
            validation = _asked(source, source_base, "val_dataloader")
    if train is None:
        raise refused(
            module,
            "there is nothing to train on: give a LightningDataModule or a DataLoader, or let the "
            "module have train_dataloader",
        )
    _refuse_several(module, train)
    updates = updates_in(train, 0)
    trainer.num_training_batches = updates
    validates = validation is not None and getattr(type(module), "validation_step", None) is not (
        getattr(base, "validation_step", None)
    )
    return FoundLoaders(_whole(train), updates, validation if validates else None)


def _asked(source: Any, base: type | None, name: str) -> Any:
    """The loader that a hook gives; None where the user's class has none."""
    method = getattr(type(source), name, None)
    if method is None or method is getattr(base, name, None):
        return None
    return getattr(source, name)()


def _refuse_several(module: Any, train: Any) -> None:
    if isinstance(train, Mapping | list | tuple) or type(train).__name__ == "CombinedLoader":
        method = getattr(type(module), "train_dataloader", None)
        where = "" if method is None else f" ({place_of(method)})"
        raise refused(
            module,
            f"train_dataloader{where} gives several loaders: give one, whose batches are the "
            "mini-batches",
        )
    if not hasattr(train, "__iter__"):
        raise ScriptError(
            "p2ptrain.lightning: what is trained on must be a LightningDataModule or a DataLoader, "
            f"not a {type(train).__name__}"
        )


def _whole(loader: Any) -> Any:
    """The loader, with each batch under one name: training_step is given all of it."""
    if not isinstance(loader, DataLoader):
        return _Named(loader)
    named = copy.copy(loader)
    named.collate_fn = _NamedBatch(loader.collate_fn)
    return named


class _NamedBatch:
    """A class, so that workers of any start method can have it."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> dict[str, Any]:
        return {BATCH: self._collate(samples)}


class _Named:
    """Of a loader that is none of torch's."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {BATCH: batch}

    def __getattr__(self, name: str) -> Any:
        """What else it has, such as its place (`state_dict`)."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class UsersCount:
    """The user's normalizer, which is given the batch itself."""

    def __init__(self, count: Callable[[Any], Any]) -> None:
        self._count = count

    def __call__(self, batch: Any) -> Any:
        return self._count(batch[BATCH])


_ONE_DEVICE = {
    **{"is_global_zero": True, "global_rank": 0, "local_rank": 0, "node_rank": 0},
    **{"world_size": 1, "num_devices": 1, "num_nodes": 1, "accumulate_grad_batches": 1},
    **{"sanity_checking": False, "max_steps": -1},
}
"""To the module a household is one device."""


class TrainerFacts:
    """In place of Lightning's Trainer.

    Attributes:
        max_epochs: of the job.
        datamodule: that of the job.
        num_training_batches: updates of one epoch; None until the loader is there, or where it
            does not say.
    """

    def __init__(self, module: Any, datamodule: Any, epochs: int) -> None:
        self.model = self.lightning_module = module
        self.datamodule = datamodule
        self.max_epochs = epochs
        self.num_training_batches: int | None = None

    @property
    def estimated_stepping_batches(self) -> int:
        """Updates in all."""
        if self.num_training_batches is None:
            raise ScriptError(
                "self.trainer.estimated_stepping_batches: the data has no length. Give the number "
                "of updates yourself"
            )
        return self.max_epochs * self.num_training_batches

    def __getattr__(self, name: str) -> Any:
        if name in _ONE_DEVICE:
            return _ONE_DEVICE[name]
        if name.startswith("__"):
            raise AttributeError(name)
        frame = sys._getframe(1)
        raise ScriptError(
            f"self.trainer.{name} ({frame.f_code.co_filename}:{frame.f_lineno}): there is no "
            "Trainer where the household trains; it has max_epochs, num_training_batches, "
            "estimated_stepping_batches and datamodule"
        )

    def __deepcopy__(self, memo: object) -> TrainerFacts:
        return self


@contextmanager
def attached(trainer: TrainerFacts, *to: Any) -> Iterator[None]:
    """They read it as `self.trainer`."""
    held = [one for one in to if one is not None]
    for one in held:
        one.trainer = trainer
    try:
        yield
    finally:
        for one in held:
            one.trainer = None
