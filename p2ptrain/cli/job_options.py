"""`-o KEY=VALUE`: the texts of the command line as the arguments of the script's `job()`.

The type of a value is the argument's annotation, or else its default's; several values have commas
between them.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2ptrain.cli.usage import UsageError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_EMPTY = inspect.Parameter.empty
_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
_UNIONS = (typing.Union, types.UnionType)
_MANY = (list, tuple, Sequence)
_NO_TEXTS = (dict, set, frozenset, bytes)


def job_arguments(
    function: Callable[..., Any], settings: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The keyword arguments for `function` that `settings` mean; a key given twice: the last.

    Raises:
        UsageError: an unknown key, a value of another type, or a required argument missing.
    """
    takes = inspect.signature(function).parameters.values()
    parameters = {parameter.name: parameter for parameter in takes if parameter.kind in _NAMED}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes)
    arguments: dict[str, Any] = {}
    for key, text in settings:
        if key not in parameters and not takes_any:
            known = "takes " + ", ".join(parameters) if parameters else "takes no options"
            raise UsageError(f"-o {key}={text}: job() takes no {key!r}; it {known}")
        wanted = _wanted(function, parameters[key]) if key in parameters else str
        try:
            arguments[key] = _converted(text, wanted)
        except ValueError as error:
            raise UsageError(f"-o {key}={text}: {key!r} {error}") from None
    for name, parameter in parameters.items():
        if parameter.default is _EMPTY and name not in arguments:
            raise UsageError(f"job() needs {name!r}: add -o {name}=VALUE")
    return arguments


def _wanted(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The type that a value must have; str if it is not known."""
    default, wanted = parameter.default, typing.cast(Any, _EMPTY)
    # Alone, as another annotation may be one that only a type checker understands.
    alone = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    with contextlib.suppress(NameError, TypeError, AttributeError, SyntaxError):
        wanted = typing.get_type_hints(alone, globalns=names)["it"]
    if wanted is _EMPTY:
        wanted = str if default is _EMPTY or default is None else type(default)
    if wanted in _MANY and isinstance(default, list | tuple):
        kinds = {type(item) for item in default}
        item = kinds.pop() if len(kinds) == 1 else str
        return list[item] if wanted is list else tuple[item, ...]  # type: ignore[valid-type]
    return wanted


def _converted(text: str, wanted: Any) -> Any:
    """`text` as a `wanted`.

    "none" is None where that may be; of several types the first that takes the text counts.

    Raises:
        ValueError: it is none; the message says what it must be.
    """
    kind, inner = typing.get_origin(wanted) or wanted, typing.get_args(wanted)
    if kind in _NO_TEXTS:
        raise ValueError(f"is a {_words(wanted)}, which no text gives")
    if kind in _MANY:
        return _several(text, kind, inner or (str, ...))
    if kind in _UNIONS and type(None) in inner and text.lower() == "none":
        return None
    with contextlib.suppress(ValueError, LookupError, StopIteration):
        if kind is typing.Literal:
            return next(choice for choice in inner if str(choice) == text)
        if kind in _UNIONS:
            return _first_of(text, [choice for choice in inner if choice is not type(None)])
        return _plain(text, kind)
    raise ValueError(f"must be {_words(wanted)}")


def _first_of(text: str, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return _converted(text, kind)
    raise ValueError


def _several(text: str, kind: Any, inner: tuple[Any, ...]) -> Any:
    """`list[int]`, `tuple[int, ...]`, `tuple[int, str]`."""
    texts = [part.strip() for part in text.split(",")] if text.strip() else []
    kinds = inner[:1] * len(texts) if kind is not tuple or inner[-1] is Ellipsis else inner
    if len(kinds) != len(texts):
        raise ValueError(f"must be {len(kinds)} values with commas between them")
    try:
        items = [_converted(part, item) for part, item in zip(texts, kinds, strict=True)]
    except ValueError:
        what = " or ".join(dict.fromkeys(map(_words, kinds)))
        raise ValueError(f"must be {what}, or several with commas between them") from None
    return tuple(items) if kind is tuple else items


def _plain(text: str, kind: Any) -> Any:
    """Raises ValueError, LookupError: `text` is none."""
    if kind is bool:
        return _TRUTH[text.lower()]
    if kind in (int, float):
        return kind(text)
    if isinstance(kind, type) and issubclass(kind, Path):
        return Path(os.path.expanduser(text))  # leaves a ~ of an unknown user as it is
    return text


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) in _UNIONS:
        return " or ".join(map(_words, typing.get_args(kind)))
    return _WORDS[kind] if kind in _WORDS else str(getattr(kind, "__name__", kind))
