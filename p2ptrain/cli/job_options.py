"""`-o KEY=VALUE`: the texts of the command line as the arguments of the script's `job()`.

The type of a value is the argument's annotation, or else its default's; several values have commas
between them.
"""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2ptrain.cli.usage import UsageError

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_MANY = (list, tuple, Sequence)
_NO_TEXTS = (dict, set, frozenset, bytes)


def job_arguments(
    function: Callable[..., Any], settings: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The keyword arguments for `function` that `settings` mean; a key given twice: the last.

    Raises:
        UsageError: an unknown key, a value of another type, or a required argument missing.
    """
    parameters = _named_parameters(function)
    takes_any = _takes_any(function)
    hints = _hints(function)
    arguments: dict[str, Any] = {}
    for key, text in settings:
        if key in parameters:
            arguments[key] = _convert(key, text, _wanted(parameters[key], hints))
        elif takes_any:
            arguments[key] = text
        else:
            raise UsageError(f"-o {key}={text}: job() takes no {key!r}; {_known(parameters)}")
    _check_required(parameters, arguments)
    return arguments


def _named_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind in named}


def _takes_any(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations, each on its own: some only a type checker understands."""
    inner = inspect.unwrap(function)
    names = getattr(inner, "__globals__", {})
    hints: dict[str, Any] = {}
    for name, annotation in getattr(inner, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints |= typing.get_type_hints(alone, globalns=names)
        except (NameError, TypeError, AttributeError, SyntaxError):
            continue
    return hints


def _known(parameters: Mapping[str, inspect.Parameter]) -> str:
    if not parameters:
        return "it takes no options"
    return "it takes " + ", ".join(parameters)


def _check_required(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> None:
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            raise UsageError(f"job() needs {name!r}: add -o {name}=VALUE")


def _wanted(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    """The type that a value must have; str if it is not known."""
    default = parameter.default
    wanted = hints.get(parameter.name)
    if wanted is None:
        wanted = str if default is inspect.Parameter.empty or default is None else type(default)
    if wanted in _MANY and isinstance(default, list | tuple):
        kinds = {type(item) for item in default}
        item = kinds.pop() if len(kinds) == 1 else str
        return list[item] if wanted is list else tuple[item, ...]  # type: ignore[valid-type]
    return wanted


def _convert(key: str, text: str, wanted: Any) -> Any:
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(key, text, typing.get_args(wanted))
    if origin is typing.Literal:
        return _convert_literal(key, text, typing.get_args(wanted))
    if (origin or wanted) in _MANY:
        return _convert_many(key, text, wanted)
    if (origin or wanted) in _NO_TEXTS:
        raise UsageError(f"-o {key}={text}: {key!r} is a {_type_text(wanted)}, which no text gives")
    try:
        return _plain(text, wanted)
    except ValueError:
        raise _not_a(key, text, _type_text(wanted)) from None


def _convert_union(key: str, text: str, choices: tuple[Any, ...]) -> Any:
    """`int | None` and the like: "none" is None, else the first type that takes the text."""
    if type(None) in choices and text.lower() == "none":
        return None
    for choice in choices:
        if choice is not type(None):
            try:
                return _convert(key, text, choice)
            except UsageError:
                continue
    raise _not_a(key, text, " or ".join(_type_text(choice) for choice in choices))


def _convert_literal(key: str, text: str, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if str(choice) == text:
            return choice
    raise _not_a(key, text, " or ".join(repr(choice) for choice in choices))


def _convert_many(key: str, text: str, wanted: Any) -> Any:
    """`list[int]`, `tuple[int, ...]`, `tuple[int, str]`; of unknown items texts."""
    texts = [part.strip() for part in text.split(",")] if text.strip() else []
    kinds = typing.get_args(wanted) or (str,)
    is_tuple = (typing.get_origin(wanted) or wanted) is tuple
    if not is_tuple or kinds[-1] is Ellipsis or not typing.get_args(wanted):
        kinds = kinds[:1] * len(texts)
    if len(kinds) != len(texts):
        raise _not_a(key, text, f"{len(kinds)} values with commas between them")
    try:
        items = [_convert(key, part, kind) for part, kind in zip(texts, kinds, strict=True)]
    except UsageError:
        what = " or ".join(dict.fromkeys(map(_type_text, kinds)))
        raise _not_a(key, text, f"{what}, or several with commas between them") from None
    return tuple(items) if is_tuple else items


def _plain(text: str, wanted: Any) -> Any:
    """Raises ValueError: `text` is no `wanted`."""
    if wanted is bool:
        return _truth(text)
    if wanted is int:
        return int(text)
    if wanted is float:
        return float(text)
    if wanted is Path or (isinstance(wanted, type) and issubclass(wanted, Path)):
        return Path(os.path.expanduser(text))  # leaves a ~ of an unknown user as it is
    return text


def _truth(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _not_a(key: str, text: str, wanted: str) -> UsageError:
    return UsageError(f"-o {key}={text}: {key!r} must be {wanted}")


def _type_text(wanted: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    return words[wanted] if wanted in words else str(getattr(wanted, "__name__", wanted))
