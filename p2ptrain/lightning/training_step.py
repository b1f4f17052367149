"""A LightningModule's `training_step` as a model that computes its loss itself.

    TrainingStep ── the same tensors, by the same names ── the user's module
        │ train mode: training_step(batch, 0) -> loss
        │ evaluation mode: the module's own forward
        └─► _Seen: the module as training_step sees it while it is traced

What `training_step` reads besides the batch and the module is fixed when it is traced. So what
changes from step to step (`global_step`, the index of a batch) is refused where it is read.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from p2ptrain.errors import CaptureError
from p2ptrain.lightning.refusals import place_of, refused

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class LoggedNames:
    """What training_step has logged.

    Attributes:
        places: where, by name.
        losses: those that are the loss itself, of each step.
    """

    # without a __dict__: what a trace changes in Python state is put back
    __slots__ = ("_values", "losses", "places")

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self.losses: set[str] = set()
        self._values: dict[str, Any] = {}

    def __deepcopy__(self, memo: object) -> LoggedNames:
        return self  # copies of the module compute, and this one is read

    def note(self, name: str, value: Any, on_step: bool | None, place: str) -> None:
        """One is logged; `on_step`: as the user says it, None where not."""
        self.places[name] = place
        if on_step is not False:
            self._values[name] = value

    def settle(self, loss: Tensor) -> None:
        """The step is over, and has returned this."""
        self.losses |= {name for name, value in self._values.items() if _is_same(value, loss)}
        self._values.clear()


def _is_same(value: Any, loss: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape != loss.shape:
        return False
    return value is loss or value.untyped_storage()._cdata == loss.untyped_storage()._cdata


class _BatchIndex(int):
    """0 for who only passes it on; what is computed with it would be fixed."""

    def _fixed(self, *_: object) -> NoReturn:
        raise _fixed_value("batch_idx", _caller())

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _fixed
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _fixed
    __mod__ = __rmod__ = __floordiv__ = __truediv__ = _fixed
    __bool__ = _fixed
    __hash__ = int.__hash__


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _fixed_value(name: str, place: str) -> CaptureError:
    return CaptureError(
        f"training_step reads {name} ({place}), which would stay as it is when the module is "
        "captured: devices get what it computes, not its code. Let what changes come with each "
        "sample, or keep it in a buffer that training_step writes in place"
    )


def _fixed_property(name: str) -> property:
    def read(_: Any) -> NoReturn:
        raise _fixed_value(f"self.{name}", _caller())

    return property(read)


def _fixed_method(name: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise _fixed_value(f"self.{name}()", _caller())

    return call


class _AsTraced:
    """What a module is, beside the user's own class, while its training_step is traced."""

    current_epoch = _fixed_property("current_epoch")
    global_step = _fixed_property("global_step")
    logger = None
    loggers = ()
    optimizers = _fixed_method("optimizers")
    lr_schedulers = _fixed_method("lr_schedulers")
    manual_backward = _fixed_method("manual_backward")

    @property
    def trainer(self) -> Any:
        """What there is of one."""
        return self.__dict__["_p2ptrain_trainer"]

    def log(self, name: str, value: Any, *_: Any, on_step: bool | None = None, **__: Any) -> None:
        """Noted only."""
        self.__dict__["_p2ptrain_logged"].note(name, value, on_step, _caller())

    def log_dict(
        self, dictionary: Mapping[str, Any], *_: Any, on_step: bool | None = None, **__: Any
    ) -> None:
        """The same of several."""
        for name, value in dictionary.items():
            self.__dict__["_p2ptrain_logged"].note(name, value, on_step, _caller())

    def print(self, *_: Any, **__: Any) -> None:
        """Once, while it is traced, says nothing of training."""


class _NoValues(dict[str, Tensor]):
    """What a collection of metrics gives."""

    def __missing__(self, _: str) -> Tensor:
        return _not_known()


def _not_known() -> Tensor:
    return torch.full((), torch.nan)


class _SilentMetric(nn.Module):
    """In place of a metric object: what it computes is no part of the loss."""

    def __init__(self, *, is_collection: bool) -> None:
        super().__init__()
        self._is_collection = is_collection

    def forward(self, *_: Any, **__: Any) -> Any:
        """Not a number."""
        return _NoValues() if self._is_collection else _not_known()

    compute = forward

    def update(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing was kept."""


def _is_metric(module: nn.Module) -> bool:
    return all(callable(getattr(module, name, None)) for name in ("update", "compute", "reset"))


def _silenced(modules: Mapping[str, nn.Module | None]) -> dict[str, nn.Module | None]:
    """Without metric objects; also of those in plain containers."""
    found: dict[str, nn.Module | None] = {}
    for name, module in modules.items():
        found[name] = module
        if module is None:
            continue
        if _is_metric(module):
            found[name] = _SilentMetric(is_collection=isinstance(module, nn.ModuleDict))
        elif type(module) in (nn.ModuleDict, nn.ModuleList) and any(
            one is not None and _is_metric(one) for one in module._modules.values()
        ):
            found[name] = copy.copy(module)
            found[name].__dict__["_modules"] = _silenced(module._modules)
    return found


def _seen(module: Any, logged: LoggedNames) -> Any:
    """The module as its training_step is to see it; the user's own stays as it is."""
    cls = type(module)
    seen = copy.copy(module)
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    seen.__class__ = type(cls.__name__, (_AsTraced, cls), named)
    seen.__dict__["_modules"] = _silenced(module._modules)
    seen.__dict__["_p2ptrain_logged"] = logged
    return seen


class TrainingStep(nn.Module):
    """See the file.

    Args:
        module: a LightningModule, which is trained in place.
        trainer: what of a Trainer training_step may read.

    Attributes:
        logged: what training_step logs.
        users_own: the user's module.
    """

    users_own: nn.Module

    def __init__(self, module: Any, trainer: object) -> None:
        self.__dict__["_seen"] = seen = _seen(module, LoggedNames())
        seen.__dict__["_p2ptrain_trainer"] = trainer
        super().__init__()
        self.__dict__.update({name: seen.__dict__[name] for name in _SHARED})
        self.training = module.training
        self.__dict__["_call"] = _call_of(module)
        self.__dict__["users_own"] = module
        self.__class__ = type(type(module).__name__, (type(self),), {"__module__": __name__})

    @property
    def logged(self) -> LoggedNames:
        """What training_step logs."""
        logged: LoggedNames = self.__dict__["_seen"].__dict__["_p2ptrain_logged"]
        return logged

    @property
    def training(self) -> bool:
        """Of the module."""
        return bool(self.__dict__["_seen"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_seen"].training = mode

    def forward(self, *given: Any, batch: Any = None, **more: Any) -> Any:
        """The loss of a batch; in evaluation mode what the module itself gives."""
        seen = self.__dict__["_seen"]
        if not self.training:
            named = {**more} if batch is None else {"batch": batch, **more}
            return seen(*given, **named)
        result = self.__dict__["_call"](seen, batch)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            step = type(seen).training_step
            raise CaptureError(
                f"training_step ({place_of(step)}) must return the loss, a tensor or "
                f"{{'loss': tensor}}, and it returns {_shown(result)}"
            )
        self.logged.settle(loss)
        return loss


def _shown(result: object) -> str:
    if isinstance(result, Mapping):
        return f"a dict with {', '.join(map(repr, result)) or 'nothing'}"
    return "None" if result is None else f"a {type(result).__name__}"


def _call_of(module: Any) -> Callable[[Any, Any], Any]:
    """How training_step is called: with the batch, or with its index too."""
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise refused(
            module,
            f"training_step ({place_of(type(module).training_step)}) takes dataloader_iter: let it "
            "take the batch",
        )
    takes_many = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    return _with_index if takes_many or len(parameters) > 1 else _with_batch


def _with_batch(seen: Any, batch: Any) -> Any:
    return seen.training_step(batch)


def _with_index(seen: Any, batch: Any) -> Any:
    return seen.training_step(batch, _BatchIndex(0))
