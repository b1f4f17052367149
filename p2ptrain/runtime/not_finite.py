"""What a device raises where something of an update is NaN or infinite."""

from __future__ import annotations

from p2ptrain.errors import TrainingError
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import StateRef
from p2ptrain.model.stage.finite import Broken

_DESCRIPTIONS = {
    "gradient": "the gradient of {name}{unit} became NaN or infinite at step {step}",
    "weight": "the update of {name}{unit} would leave it NaN or infinite at step {step}",
    "optimizer state": (
        "the update of {name}{unit} would leave what the optimizer keeps of it NaN or infinite at "
        "step {step}"
    ),
    "buffer": "the running statistic {name}{unit} became NaN or infinite at step {step}",
}


class MicroBatchNotFinite(TrainingError):
    """The update under way is not finite: it must not count.

    Attributes:
        step: number of the update, from 1.
        micro_batch: which of its round's, from 0; None = it shows in their sum only.
        micro_batch_number: under which number its stages still hold what a diagnosis needs.
        is_update: gradients are finite, and the update is not.
    """

    def __init__(
        self,
        message: str,
        step: int,
        *,
        micro_batch: int | None = None,
        micro_batch_number: int | None = None,
        is_update: bool = False,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.micro_batch = micro_batch
        self.micro_batch_number = micro_batch_number
        self.is_update = is_update


def broken_update(
    broken: Broken,
    step: int,
    description: ModelDescription,
    first: int,
    end: int,
    *,
    scale: float = 0.0,
) -> MicroBatchNotFinite:
    """What units [first, end) have to say of an update with a tensor that is not finite."""
    unit = f" (layer {first_user(description, first, end, broken.name)})"
    message = _DESCRIPTIONS[broken.what].format(name=broken.name, unit=unit, step=step)
    if scale and broken.what == "gradient":
        message += f", even with a loss scale of {scale:.2g}"
    return MicroBatchNotFinite(
        message, step, is_update=broken.what in ("weight", "optimizer state")
    )


def first_user(description: ModelDescription, first: int, end: int, name: str) -> str:
    """Name of the first of units [first, end) that uses a tensor of the state."""
    units = description.units[first:end]
    for unit in units:
        for node in description.train.nodes[slice(*unit.train)]:
            if StateRef(name) in node.references():
                return unit.name
    return units[0].name
