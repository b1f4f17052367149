"""Logs as events with keys, through the standard library's logging, silent unless asked for.

An app that embeds p2ptrain must not find our lines on its stdout. So the logger "p2ptrain" has a
handler that does nothing, as the standard library advises libraries (Python's "Logging HOWTO"); an
app that configures logging sees our lines where it wants them, and the command line sends them to
stderr. structlog's own global configuration is the app's: it is neither used nor changed here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    import structlog

ROOT_NAME = "p2ptrain"

logging.getLogger(ROOT_NAME).addHandler(logging.NullHandler())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of the module `name`: `log.warning("what_happened", peer=..., why=...)`."""
    return cast("structlog.stdlib.BoundLogger", _MadeWhenUsed(name))


class _MadeWhenUsed:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        """Of structlog's logger; it stays here, so that this is asked once for each method."""
        import structlog  # here: it loads rich and attrs for 0.05 s, and --help logs nothing

        logger = structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )
        found = self.__dict__[method] = getattr(logger.bind(), method)
        return found


@contextmanager
def timed(log: structlog.stdlib.BoundLogger, what: str, **fields: object) -> Iterator[None]:
    """Log at the end how long it took: the way to a first step is a sum of such phases."""
    started = monotonic()
    yield
    log.info(what, seconds=round(monotonic() - started, 3), **fields)


class _Stderr(logging.StreamHandler[TextIO]):
    """To what `sys.stderr` is now: a view on a terminal shows lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_to_stderr(*, debug: bool) -> None:
    """Lines on stderr: warnings, and with `debug` everything. For the command line only."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger(ROOT_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    logger.propagate = False  # a script that configures logging would show each line twice
