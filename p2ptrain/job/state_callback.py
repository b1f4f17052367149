"""Callbacks that work with what has been trained so far: they evaluate it, or save it.

    on_step(s)      the callback sets `wanted`, where it wants the state of step s
    on_state(...)   it is given that state, in the callbacks' thread
    step s + 1      begins when `on_state` has returned

Only after steps for which `stands_still_after` says so the next mini-batch waits for the callback,
so that what it is given is the state of that step and of no other. After other steps nothing waits,
and what a callback wants there it gets after the next step where training stands still.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class WantedState(Enum):
    """What a callback wants of the state."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    ALL = "all"
    """The optimizer's state too, which is more to bring here."""


@dataclass(frozen=True)
class TrainedState:
    """What has been trained.

    Attributes:
        step: updates behind it.
        weights: by the names of the user's state_dict.
        write_checkpoint: writes a checkpoint to a folder, for `TrainOptions.resume`;
            None where only the weights were wanted. Raises TrainingError: it cannot be written.
    """

    step: int
    weights: Mapping[str, Tensor]
    write_checkpoint: Callable[[Path], None] | None


class StateCallback(ABC):
    """A callback of rounds that is given the state; it has other hooks of a callback too.

    Attributes:
        wanted: what it wants next; the callback itself sets it, and takes it back in `on_state`,
            or wants more.
        measures: whether it evaluates by itself, and sets `measured`.
        measured: in `on_state`, what a ReduceLROnPlateau is stepped with.
        evaluated: in `on_state`, metrics that an eval event is to have; None: there is no event.
    """

    wanted: WantedState = WantedState.NOTHING
    measures: bool = False
    measured: float | None = None
    evaluated: Mapping[str, float] | None = None

    @abstractmethod
    def stands_still_after(self, step: int) -> bool:
        """Whether the next mini-batch begins only once this callback has done its work.

        Asked on the event loop, before `on_step`, perhaps more than once.
        """

    @abstractmethod
    def on_state(self, state: TrainedState) -> None:
        """Work with what was wanted. Raises StopTraining: the job ends well."""
