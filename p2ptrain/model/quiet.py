"""torch's own loggers, silent for a while: what they say of a failed trace is for people who know
its insides, and p2ptrain says it in words of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def torch_is_quiet() -> Iterator[None]:
    """Meanwhile no logger of torch says anything."""

    def nothing(_record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict]
    handlers = [h for one in loggers if one.name.split(".")[0] == "torch" for h in one.handlers]
    for handler in handlers:
        handler.addFilter(nothing)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(nothing)
