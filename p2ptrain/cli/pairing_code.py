"""Where a pairing code comes from, and where it must not stay: in the list of processes.

Every user of a machine can read the arguments of every process while it runs. So a process that got
a code there restarts itself without it (as the same process), and finds it in its environment,
which only its owner can read. It is better not to type the code there at all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from p2ptrain.cli import startup
from p2ptrain.cli.usage import UsageError
from p2ptrain.errors import OptionError
from p2ptrain.mesh.trust.pairing_window import normalised_code

VARIABLE = "P2PTRAIN_CODE"

OPTION, FILE_OPTION = "--code", "--code-file"

PROMPT = "-"
"""The code that means: ask for it."""

_FILE_LIMIT_BYTES = 1024

Execute = Callable[[str, list[str], Mapping[str, str]], object]


def take_out_of_sight(
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    execute: Execute = os.execve,
) -> None:
    """Start this process again without the code among its arguments, if there is one.

    Nothing happens on Windows, which cannot do that, nor where the arguments are wrong: what stands
    there is no code, or several are given.

    Args:
        arguments: what follows the program's name.
    """
    code, rest = _split(arguments)
    if code is None or os.name != "posix" or not startup.is_whole_process(arguments):
        return
    program = sys.orig_argv[1 : -len(arguments)]
    with contextlib.suppress(OSError):  # then it stays as it is
        changed = {**environment, VARIABLE: code}
        execute(sys.executable, [sys.executable, *program, *rest], changed)


def _split(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the code that stands there alone, all other arguments)."""
    found: list[str] = []
    rest: list[str] = []
    ahead = iter(arguments)
    for argument in ahead:
        if argument == OPTION:
            found.append(next(ahead, ""))
        elif argument.startswith(f"{OPTION}="):
            found.append(argument.removeprefix(f"{OPTION}="))
        else:
            rest.append(argument)
    others = any(argument.split("=")[0] == FILE_OPTION for argument in rest)
    if len(found) != 1 or others:
        return None, rest
    try:
        return normalised_code(found[0]), rest
    except OptionError:  # "-", or a slip: the parser refuses it
        return None, rest


def chosen(
    option: str | None,
    file: Path | None,
    environment: MutableMapping[str, str] = os.environ,
    ask: Callable[[], str] | None = None,
) -> str | None:
    """The code that this start was given, in whichever way; None without one.

    It is taken out of the environment, which programs that this one starts would inherit.

    Raises:
        UsageError: it is no code.
    """
    inherited = environment.pop(VARIABLE, "")
    if option == PROMPT:
        return _checked((ask or _asked)(), "what was typed")
    if option is not None:
        return option
    if file is not None:
        return _checked(_read(file), f"{FILE_OPTION} {file}")
    return _checked(inherited, f"${VARIABLE}") if inherited.strip() else None


def _checked(text: str, source: str) -> str:
    """The eight digits; what else stands there is not shown."""
    try:
        return normalised_code(text.strip())
    except OptionError as error:
        raise UsageError(f"{source}: {error}") from error


def _read(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return content.read(_FILE_LIMIT_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{FILE_OPTION} {file} cannot be read: {error.strerror}") from error


def _asked() -> str:
    """A line of standard input."""
    if startup.release_signals():
        raise KeyboardInterrupt
    if sys.stdin.isatty():
        sys.stderr.write("pairing code (the other device shows it): ")
        sys.stderr.flush()
    return sys.stdin.readline()
