"""Loads a training script and calls its `job()`; what goes wrong there names the user's own line.

The script runs as a module of its own on the device that holds the data, and only there: other
devices get the model as data, never the script.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.job_options import job_arguments
from p2ptrain.errors import ScriptError

if TYPE_CHECKING:
    from p2ptrain.training.job import Job

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
    made = _call(lambda: make_job(**arguments), path, script)
    from p2ptrain.training.job import Job

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
    _call(lambda: loader.exec_module(module), path, shown)
    return module


def _call(action: Callable[[], Any], path: Path, shown: str) -> Any:
    """Run the user's code; whatever it raises becomes a ScriptError that names its line."""
    try:
        return action()
    except SyntaxError as error:
        raise ScriptError(_syntax_text(error, shown)) from error
    except SystemExit as error:
        where = _place(error, path) or shown
        raise ScriptError(f"{where}: the script ended itself (exit code {error.code})") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a library in Rust, for one, is no Exception
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
    if isinstance(error, ModuleNotFoundError):
        return " (install it on this device; the other devices do not need it)"
    return ""


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__
