"""The optimizers a Job may name, as plain data that travels to devices without user code.

Names, order and defaults of the arguments are torch.optim's. Left out are those that make no sense
across devices: `differentiable`, `capturable` and a learning rate held in a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

import torch

from p2ptrain.errors import OptionError, ProtocolError

LARGEST = 1e30
"""Of an optimizer's numbers. Torch raises in the middle of an update where one of them, or what it
makes of them (Adam divides the learning rate), does not fit into the parameters' float32."""

_Class = TypeVar("_Class", bound=type)


def _refuses_parameters(cls: _Class) -> _Class:
    """`cls`, with an error that explains the difference if it is given parameters, as in torch."""
    changed: Any = cls
    made = changed.__init__

    @functools.wraps(made)
    def init(self: object, *args: object, **kwargs: object) -> None:
        given = args[0] if args else kwargs.get("params")
        is_number = hasattr(given, "__float__")
        if isinstance(given, Iterable) and not is_number and not isinstance(given, str):
            raise OptionError(
                f"p2ptrain.{cls.__name__} takes no parameters and no groups of them: each device "
                "makes it for those that it gets, all with the same numbers. Leave out the first "
                "argument; what is not to be trained gets requires_grad_(False)"
            )
        made(self, *args, **kwargs)

    changed.__init__ = init
    return cls


class _Spec:
    """What the three have in common: validation by torch itself, and their form on the wire."""

    __slots__ = ()
    torch_class: ClassVar[type[torch.optim.Optimizer]]

    def __post_init__(self) -> None:
        self._check_types()
        try:
            self.build([torch.nn.Parameter(torch.zeros(1))])
        except (ValueError, RuntimeError) as error:
            raise OptionError(f"p2ptrain.{self.name}: {error}") from error

    @property
    def name(self) -> str:
        """The class's name, which is torch's too."""
        return type(self).__name__

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the torch.optim class of the same name."""
        return {field: getattr(self, field) for field in _field_names(type(self))}

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`, in the order given."""
        return self.torch_class(parameters, **self.arguments())

    def to_fields(self) -> dict[str, Any]:
        """A CBOR-able dict: "name" and the arguments."""
        arguments = self.arguments()
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
        return {"name": self.name, **plain}

    def _check_types(self) -> None:
        for field, value in self.arguments().items():
            if field == "betas":
                object.__setattr__(self, "betas", self._checked_betas(value))
            elif field in _SWITCHES:
                self._require(value is None or isinstance(value, bool), field, value, "a bool")
            else:
                wanted = f"a finite number, {LARGEST:.0e} at most"
                self._require(_is_number(value), field, value, wanted)

    def _checked_betas(self, value: object) -> tuple[float, float]:
        ok = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_number, value))
        self._require(ok, "betas", value, "two finite numbers")
        assert isinstance(value, (tuple, list))
        return (value[0], value[1])

    def _require(self, ok: bool, field: str, value: object, wanted: str) -> None:
        if not ok:
            message = f"{field} must be {wanted}, not {_shown(value)}"
            raise OptionError(f"p2ptrain.{self.name}: {message}")


_SWITCHES = frozenset(
    {"nesterov", "amsgrad", "maximize", "foreach", "fused", "decoupled_weight_decay"}
)
"""Boolean arguments; None where torch chooses."""


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= LARGEST  # not NaN, and whole numbers of any length can be compared


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # a whole number of more than 4300 digits, which a peer may well send
        return f"this {type(value).__name__}"


def _field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


@_refuses_parameters
@dataclass(frozen=True, slots=True)
class SGD(_Spec):
    """torch.optim.SGD's arguments. Raises OptionError where torch would refuse them."""

    torch_class = torch.optim.SGD
    lr: float = 1e-3
    momentum: float = 0
    dampening: float = 0
    weight_decay: float = 0
    nesterov: bool = False
    _: KW_ONLY
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


@_refuses_parameters
@dataclass(frozen=True, slots=True)
class Adam(_Spec):
    """torch.optim.Adam's arguments. Raises OptionError where torch would refuse them."""

    torch_class = torch.optim.Adam
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0
    amsgrad: bool = False
    _: KW_ONLY
    foreach: bool | None = None
    maximize: bool = False
    fused: bool | None = None
    decoupled_weight_decay: bool = False


@_refuses_parameters
@dataclass(frozen=True, slots=True)
class AdamW(_Spec):
    """torch.optim.AdamW's arguments. Raises OptionError where torch would refuse them."""

    torch_class = torch.optim.AdamW
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    _: KW_ONLY
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


OptimizerSpec = SGD | Adam | AdamW

_BY_NAME: dict[str, type[SGD] | type[Adam] | type[AdamW]] = {
    "SGD": SGD,
    "Adam": Adam,
    "AdamW": AdamW,
}


def optimizer_from_fields(fields: Mapping[str, Any]) -> OptimizerSpec:
    """Rebuild what `to_fields` gave.

    Raises:
        ProtocolError: the name or an argument is not one of ours, or has an unusable value.
    """
    name = fields.get("name")
    if not isinstance(name, str) or name not in _BY_NAME:
        raise ProtocolError("a peer named an unknown optimizer")
    cls = _BY_NAME[name]
    arguments = {key: value for key, value in fields.items() if key != "name"}
    if set(arguments) != set(_field_names(cls)):
        raise ProtocolError(f"a peer sent other arguments than those of {name}")
    try:
        return cls(**arguments)
    except OptionError as error:
        raise ProtocolError(f"a peer sent an unusable {name}") from error
