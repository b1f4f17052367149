"""Loads a training script and calls its `job()`; an error there names the user's own line.

The script runs as a module of its own, only on the device that holds the data: other devices get
the model as data, never the script.

`-o KEY=VALUE` gives texts to the arguments of `job()`. The type of a value is the argument's
annotation, or else its default's; several values are separated by commas.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.usage import UsageError
from p2ptrain.errors import ScriptError, UserError

if TYPE_CHECKING:
    from p2ptrain.job.job import Job

MODULE_NAME = "p2ptrain_script"
"""Not "__main__": what stands under `if __name__ == "__main__"` is for running it by hand."""


def load_job(script: str, settings: Sequence[tuple[str, str]]) -> Job:
    """The Job that `script`'s `job()` returns for the settings of `-o`.

    Raises:
        ScriptError: the script cannot be loaded, or `job()` fails or returns something else.
        UsageError: a setting that `job()` does not take, or a value of another type.
    """
    path = Path(os.path.expanduser(script)).absolute()  # leaves a ~ of an unknown user as it is
    make_job = load_job_function(path, shown=script)
    arguments = job_arguments(make_job, settings)
    with _arguments_of(path):
        made = _call(lambda: make_job(**arguments), path, script)
    from p2ptrain.job.job import Job

    if not isinstance(made, Job):
        raise ScriptError(f"{script}: job() must return a p2ptrain.Job, not {_type_name(made)}")
    return made


def load_job_function(path: Path, shown: str) -> Callable[..., Any]:
    """The function `job` of the script at `path`. Raises ScriptError."""
    module = _load_module(path, shown)
    function = getattr(module, "job", None)
    if function is None:
        raise ScriptError(f"{shown} defines no job(): write `def job() -> p2ptrain.Job: ...`")
    if not callable(function) or isinstance(function, type):
        raise ScriptError(f"{shown}: job must be a function, not {_type_name(function)}")
    return function  # type: ignore[no-any-return]


def _load_module(path: Path, shown: str) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ScriptError(f"the script {shown} {what}")
    loader = importlib.machinery.SourceFileLoader(MODULE_NAME, str(path))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)  # has __file__
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses and pickling look a class's module up here
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _arguments_of(path):
        _call(lambda: loader.exec_module(module), path, shown)
    return module


@contextlib.contextmanager
def _arguments_of(path: Path) -> Iterator[None]:
    """Meanwhile a script that reads the command line, as by argparse, sees no arguments."""
    given, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = given


def _call(action: Callable[[], Any], path: Path, shown: str) -> Any:
    """Run the user's code; a failure becomes a ScriptError with its line, a UserError stays."""
    try:
        return action()
    except SyntaxError as error:
        raise ScriptError(_syntax_text(error, shown)) from error
    except SystemExit as error:
        where = _place(error, path) or shown
        raise ScriptError(
            f"{where}: the script ended itself (exit code {error.code}){_hint(error)}"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a library in Rust, for one, is no Exception
        if type(error) is UserError:  # the script's own words for its user
            raise
        where = _place(error, path) or shown
        raise ScriptError(f"{where}: {type(error).__name__}: {error}{_hint(error)}") from error


def _syntax_text(error: SyntaxError, shown: str) -> str:
    line = f", line {error.lineno}" if error.lineno else ""
    text = f": {error.text.strip()}" if error.text else ""
    return f"{error.filename or shown}{line}: {error.msg}{text}"


def _place(error: BaseException, path: Path) -> str | None:
    """The deepest line of the user's own files, as `FILE, line N, in FUNCTION: TEXT`."""
    folder = path.parent
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_own(Path(frame.filename), folder)
    ]
    if not own:
        return None
    frame = own[-1]
    text = linecache.getline(frame.filename, frame.lineno or 0).strip()
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"{frame.filename}, line {frame.lineno}{inside}: {text}"


def _is_own(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder) and "site-packages" not in file.parts


def _hint(error: BaseException) -> str:
    called = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SystemExit) and argparse.__file__ in called:
        return ". It gets no arguments here: let job() take them, and give them as -o KEY=VALUE"
    if isinstance(error, ModuleNotFoundError):
        return " (install it on this device; the other devices do not need it)"
    return ""


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


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
