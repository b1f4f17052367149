"""What `self.trainer` says where the household trains: what is known before, and stays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from p2ptrain.errors import ScriptError

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
