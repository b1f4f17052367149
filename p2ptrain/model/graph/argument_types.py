"""Whether what a model gives an operator is of the types that the operator's schema means.

torch takes a whole number where a dtype, a layout or a memory format is meant, and believes it; it
takes not a number and infinities for scales, and computes addresses from them. So each argument is
looked at once, when the model is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from p2ptrain.model.graph.nodes import Argument, InputRef, NodeRef, StateRef, TargetRef
from p2ptrain.model.graph.values import Polynomial

_MAX_TIMES = 1 << 10

Check: TypeAlias = Callable[[Argument], bool]

_NUMBERS_MAY_BE_INFINITE = frozenset({"p", "ord", "nan", "posinf", "neginf", "value"})
"""Arguments whose type is a float and that mean something where they are infinite: norms."""

_MAX_SCALE = 1e6
"""Of a picture that grows or shrinks, by each side."""


def _is_tensor(argument: Argument) -> bool:
    """A number too: torch makes a tensor without dimensions of it."""
    return isinstance(argument, InputRef | TargetRef | StateRef | NodeRef) or _is_number(argument)


def _is_whole(argument: Argument) -> bool:
    return type(argument) is int or isinstance(argument, Polynomial | NodeRef)


def _is_number(argument: Argument) -> bool:
    return isinstance(argument, bool | float | complex) or _is_whole(argument)


def _is_float(argument: Argument) -> bool:
    return isinstance(argument, float) or _is_whole(argument)


def _is_finite(argument: Argument) -> bool:
    return _is_float(argument) and not (isinstance(argument, float) and not math.isfinite(argument))


def _is_scale(argument: Argument) -> bool:
    if isinstance(argument, float | int):
        return 1 / _MAX_SCALE <= argument <= _MAX_SCALE
    return False


def _is_exact(argument: Argument) -> bool:
    """Also as a float."""
    return argument is None or (type(argument) is int and abs(argument) <= 1 << 20)


def _is_few(argument: Argument) -> bool:
    """As often something is done for each element, where shapes do not show it."""
    return type(argument) is int and 0 <= argument <= _MAX_TIMES


def _is_text(argument: Argument) -> bool:
    return isinstance(argument, str) and argument.isascii() and argument.isprintable()


def _is_one_of(kind: type) -> Check:
    return lambda argument: isinstance(argument, kind)


_CHECKS: Mapping[str, Check] = {
    "Tensor": _is_tensor,
    "int": _is_whole,
    "SymInt": _is_whole,
    "number": _is_number,
    "float": _is_finite,
    "bool": _is_one_of(bool),
    "str": _is_text,
    "ScalarType": _is_one_of(torch.dtype),
    "Layout": _is_one_of(torch.layout),
    "MemoryFormat": _is_one_of(torch.memory_format),
    "Device": _is_one_of(torch.device),
    "Generator": lambda argument: False,
}
"""The schema's real types that a model's arguments may have; operators with others are refused."""

_OF_ONE: Mapping[str, Mapping[str, Check]] = {
    "aten::random": {"from": _is_exact, "to": _is_exact},  # it counts on in floats
    "aten::mvlgamma": {"p": _is_few},
    "aten::special_multigammaln": {"p": _is_few},
}
"""By operator."""


def can_be_checked(schema: torch.FunctionSchema) -> bool:
    """Whether an operator takes only what a model may give, and computes with tensors."""
    types = [_plain_type(str(argument.real_type)) for argument in schema.arguments]
    known = all(name in _CHECKS for name in types)
    results = [_plain_type(str(result.real_type)) for result in schema.returns]
    return known and "Tensor" in (*types, *results)


class ArgumentTypes:
    """Of one operator, by its schema."""

    def __init__(self, schema: torch.FunctionSchema) -> None:
        arguments = schema.arguments
        self._checks = {a.name: _check(a.name, str(a.real_type)) for a in arguments}
        self._checks |= _OF_ONE.get(schema.name.removesuffix("_"), {})
        self._positional = [a.name for a in arguments if not a.kwarg_only]
        self._whole = frozenset(
            a.name for a in arguments if _plain_type(str(a.real_type)) in ("int", "SymInt")
        )
        self._needed = frozenset(a.name for a in arguments if not a.has_default_value())

    def is_whole(self, name: str) -> bool:
        """Whether an argument is a whole number, or several: a size or a place."""
        return name in self._whole

    def wrong(self, args: Sequence[Argument], kwargs: Sequence[tuple[str, Argument]]) -> str | None:
        """What is wrong with arguments; None where nothing is."""
        if len(args) > len(self._positional):
            return "more arguments than it has"
        given = dict(zip(self._positional, args, strict=False))
        for name, argument in kwargs:
            if name in given or name not in self._checks:
                return f"an argument {name[:40]!r} that it does not have, or twice"
            given[name] = argument
        if not self._needed <= given.keys():
            return f"no {min(self._needed - given.keys())!r}"
        for name, argument in given.items():
            if not self._checks[name](argument):
                return f"something else as {name!r} than it takes"
        return None


def _plain_type(written: str) -> str:
    """`Tensor` of `List[Optional[Tensor]]`."""
    for outer in ("Optional[", "List["):
        if written.startswith(outer):
            return _plain_type(written[len(outer) : -1])
    return written


def _check(name: str, written: str) -> Check:
    if written.startswith("Optional["):
        inner = _check(name, written[len("Optional[") : -1])
        return lambda argument: argument is None or inner(argument)
    if written.startswith("List["):
        return _list_check(_check(name, written[len("List[") : -1]), written)
    if name.startswith("scale") and "float" in written and name != "scale":
        return _is_scale
    if written == "float" and name in _NUMBERS_MAY_BE_INFINITE:
        return _is_float
    return _CHECKS[written]


def _list_check(item: Check, written: str) -> Check:
    """Of tensors also what an operator gave that has several results; of numbers also one."""
    if "Tensor" in written:
        return lambda listed: (
            all(map(item, listed)) if isinstance(listed, tuple) else isinstance(listed, NodeRef)
        )
    if written in ("List[int]", "List[SymInt]"):
        return lambda listed: (
            all(map(item, listed)) if isinstance(listed, tuple) else _is_whole(listed)
        )
    return lambda listed: isinstance(listed, tuple) and all(map(item, listed))


def numbers_only(args: Sequence[Argument]) -> bool:
    """Whether these may be numbers, all of them: what arithmetic on sizes takes."""
    return 1 <= len(args) <= 2 and not any(
        isinstance(argument, complex) or not _is_number(argument) for argument in args
    )
