"""Who is shown what torch says while a model is traced: it is for people who know its insides.

The thread that traces says nothing, and other threads all of theirs. What the user's own module
warns of is shown once, when it runs by itself (`rehearsal`).
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch.export import _trace

Show = Callable[[Warning | str, type[Warning], str, int, TextIO | None, str | None], None]


@contextlib.contextmanager
def torch_is_quiet() -> Iterator[None]:
    """Meanwhile no logger of torch says anything in this thread, and nothing warns in it."""
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict]
    handlers = [h for one in loggers if one.name.split(".")[0] == "torch" for h in one.handlers]
    for handler in handlers:
        handler.addFilter(is_of_others)
    try:
        with _shown_by(lambda *_: None), _no_graphs_printed():
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_others)


@contextlib.contextmanager
def warned_once() -> Iterator[None]:
    """Meanwhile this thread's warnings are shown once each, also those that a trace has met."""
    said: set[tuple[str, str, int]] = set()
    always, show = torch.is_warn_always_enabled(), warnings.showwarning

    def show_once(message: Any, kind: Any, filename: str, line: int, *rest: Any) -> None:
        if (str(message), filename, line) not in said:
            said.add((str(message), filename, line))
            show(message, kind, filename, line, *rest)

    with warnings.catch_warnings():  # what was met while nothing was shown counts as shown
        pass
    torch.set_warn_always(True)
    try:
        with _shown_by(show_once):
            yield
    finally:
        torch.set_warn_always(always)


@contextlib.contextmanager
def _shown_by(function: Show) -> Iterator[None]:
    """Warnings of this thread, as far as filters let them through."""
    thread, original = threading.get_ident(), warnings.showwarning

    def show(*args: Any, **kwargs: Any) -> None:
        (function if threading.get_ident() == thread else original)(*args, **kwargs)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = original


@contextlib.contextmanager
def _no_graphs_printed() -> Iterator[None]:
    """Where it fails torch.export prints the half-made graph."""
    thread, module = threading.get_ident(), vars(_trace)

    def printed(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != thread:
            builtins.print(*args, **kwargs)  # noqa: T201

    before = module.get("print")
    module["print"] = printed
    try:
        yield
    finally:
        if before is None:
            del module["print"]
        else:
            module["print"] = before
