"""Runs `p2ptrain` as on Windows, as far as Linux can show it:  python windows_like.py ARGUMENTS...

p2ptrain's own modules find `sys.platform == "win32"`, none of Unix's names, a thread clock of
15.6 ms, an event loop without signal handlers, and files that cannot be replaced for a moment.
Libraries find this system, for which they were built.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import importlib
import os
import pathlib
import signal
import socket
import sys
import time
import types
from collections.abc import Collection, Mapping
from typing import Any

REFUSALS = 2
"""How often a file is open elsewhere before it may be replaced."""
CLOCK_SECONDS = 0.015625

_refused: dict[str, int] = {}
_import = builtins.__import__
_replace = pathlib.Path.replace


class Seen(types.ModuleType):
    """A module as p2ptrain sees it: `others` instead of its own names, `missing` not at all."""

    def __init__(
        self, real: types.ModuleType, missing: Collection[str] = (), **others: object
    ) -> None:
        super().__init__(real.__name__)
        vars(self).update(others)
        self._real = real
        self._missing = frozenset(missing)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self._real.__name__!r} has no attribute {name!r}")
        return getattr(self._real, name)


def _thread_time() -> float:
    return time.thread_time() // CLOCK_SECONDS * CLOCK_SECONDS


def _modules() -> Mapping[str, types.ModuleType | None]:
    """By name; None: it cannot be imported."""
    signals = [name for name in dir(signal) if name.startswith("SIG") and name.isupper()]
    kept = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN")
    unix = ("fork", "getuid", "geteuid", "fchmod", "sched_getaffinity", "getloadavg", "mkfifo")
    locks = types.ModuleType("msvcrt")
    vars(locks).update(LK_NBLCK=2, LK_UNLCK=0, locking=lambda *_arguments: None)
    kernel = types.SimpleNamespace(SetConsoleCtrlHandler=lambda _handler, _add: 1)
    return {
        **dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop")),
        "ctypes": Seen(
            ctypes,
            windll=types.SimpleNamespace(kernel32=kernel),
            WINFUNCTYPE=ctypes.CFUNCTYPE,
        ),
        "msvcrt": locks,
        "os": Seen(os, unix, name="nt"),
        "signal": Seen(
            signal,
            [*(name for name in signals if name not in kept), "setitimer", "ITIMER_PROF"],
            SIGBREAK=signal.SIGUSR2,
        ),
        "socket": Seen(socket, ("AF_UNIX", "SO_REUSEPORT", "TCP_INFO")),
        "sys": Seen(sys, platform="win32"),
        "time": Seen(time, thread_time=_thread_time),
    }


def become_windows() -> None:
    """See the module."""
    modules = _modules()

    def import_as_seen(
        name: str, globals: Any = None, *rest: Any, **named: Any
    ) -> types.ModuleType:
        importer = str((globals or {}).get("__name__"))
        if name in modules and importer.partition(".")[0] == "p2ptrain":
            seen = modules[name]
            if seen is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return seen
        return _import(name, globals, *rest, **named)

    builtins.__import__ = import_as_seen
    asyncio.SelectorEventLoop.add_signal_handler = _no_handlers  # type: ignore[method-assign]
    pathlib.Path.replace = _replace_later  # type: ignore[method-assign]


def _replace_later(path: pathlib.Path, target: Any) -> pathlib.Path:
    seen = _refused[str(target)] = _refused.get(str(target), 0) + 1
    if os.path.exists(target) and seen % (REFUSALS + 1):
        raise PermissionError(13, "Access is denied", str(target))
    return _replace(path, target)


def _no_handlers(*_arguments: object) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    become_windows()
    sys.argv[0] = "p2ptrain"
    sys.exit(importlib.import_module("p2ptrain.__main__").main())
