"""What of a LightningModule cannot be taken, and where it stands in the user's file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from p2ptrain.errors import ScriptError

_GRADIENTS: Final = (
    "gradients and optimizers are on the devices that train. Of what changes them, p2ptrain has "
    "clip_grad_norm, and the optimizer's own numbers"
)
_BATCHES: Final = "do it in the dataset, or in the loader's collate_fn"
_MOMENTS: Final = (
    "it would never be called: devices train parts of the module by themselves. Give a callback "
    "with on_start, on_step, on_eval or on_end"
)

NOT_TAKEN: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
            *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
            "on_before_zero_grad",
        ),
        _GRADIENTS,
    ),
    "lr_scheduler_step": "schedulers are stepped as torch's are: scheduler.step()",
    **dict.fromkeys(
        ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
        _BATCHES,
    ),
    **dict.fromkeys(
        (
            *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
            *("on_train_epoch_start", "on_train_epoch_end"),
            *("on_train_batch_start", "on_train_batch_end"),
        ),
        _MOMENTS,
    ),
    "configure_callbacks": "give the job's callbacks: p2ptrain.lightning.job(..., callbacks=[...])",
}
"""Methods that the user's class must not have of its own, and why."""


def lightning_base(value: object, name: str) -> type | None:
    """Lightning's own class of that name among the bases of an object's class, whichever package
    it comes from."""
    for base in type(value).__mro__:
        if base.__name__ == name and base.__module__.partition(".")[0] in (
            *("lightning", "pytorch_lightning"),
        ):
            return base
    return None


def refuse_hooks(value: object, base: type) -> None:
    """Raises ScriptError: names each method of the user's that cannot be taken, with its line."""
    found = [
        f"{name} ({place_of(getattr(type(value), name))}): {why}"
        for name, why in NOT_TAKEN.items()
        if hasattr(base, name) and has_own(value, base, name)
    ]
    if found:
        raise refused(value, "; ".join(found))


def refuse_manual(module: Any) -> None:
    """Raises ScriptError: the module makes its updates itself."""
    if not module.automatic_optimization:
        where = _line_with(type(module), r"automatic_optimization\s*(=|\()") or place_of_class(
            type(module)
        )
        raise refused(
            module,
            f"automatic_optimization is False ({where}): the devices that train make the updates. "
            "Let training_step return the loss, with one optimizer",
        )


def refused(value: object, what: str) -> ScriptError:
    """The error of something in the user's class."""
    return ScriptError(f"p2ptrain.lightning cannot take {type(value).__name__}: {what}")


def has_own(value: object, base: type, name: str) -> bool:
    """Whether the user's class has a method of its own where Lightning's does nothing special."""
    return getattr(type(value), name) is not getattr(base, name)


def place_of(function: Callable[..., Any]) -> str:
    """file:line of a method."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def place_of_class(cls: type) -> str:
    """file:line of a class, or of one of its methods where its source is not at hand."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


def _line_with(cls: type, pattern: str) -> str | None:
    """file:line of the first line of the user's classes in which a pattern stands."""
    return next((place for base in cls.__mro__ for place in _lines(base, pattern)), None)


def _lines(cls: type, pattern: str) -> Iterator[str]:
    if cls.__name__ == "LightningModule":
        return
    try:
        lines, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return
    for number, line in enumerate(lines, first):
        if re.search(pattern, line):
            yield f"{inspect.getsourcefile(cls)}:{number}"
