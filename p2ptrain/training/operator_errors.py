"""What torch's operators raise where they cannot compute with what they are given."""

from __future__ import annotations

from p2ptrain.training.budget import is_out_of_memory

OPERATORS_RAISE = (IndexError, RuntimeError, ValueError)


def unit_of(error: BaseException) -> str | None:
    """The unit whose forward raised it (`model.program` notes its name); None: something else did.

    Where memory was short it is no unit's fault.
    """
    if is_out_of_memory(error):
        return None
    return next(iter(getattr(error, "__notes__", ())), None)


def first_line(error: BaseException) -> str:
    """Torch explains itself at length behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def failure_text(error: BaseException) -> str:
    """Of a model that fails as it does in plain torch."""
    unit = unit_of(error)
    where = "its backward" if unit is None else f"layer {unit}"
    return f"the model fails in {where}: {first_line(error)}"
