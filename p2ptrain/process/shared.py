"""Where a node's box comes from.

load_training()  ─►  fork_from_here()  ─►  forked_box()     the command line's, one a process
Node in an app   ─────────────────────►  started_box(...)   its own, started when it is needed
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.logs import get_logger
from p2ptrain.process.box import Box, Starter, Zygote

log = get_logger(__name__)

_forked: list[Box] = []


def fork_from_here() -> None:
    """Of this process, in which everything is loaded, one thread runs torch and none has yet."""
    if sys.platform != "linux" or _forked:
        return
    zygote = Zygote()
    try:
        zygote.fork()
    except OSError as error:  # as many processes as this person may have
        log.warning("no_box_forked", why=str(error))
        return
    _forked.append(Box(zygote))


def forked_box() -> Box | None:
    """The one of `fork_from_here`; it stays as long as this process."""
    return _forked[0] if _forked else None


def started_box(preload: Sequence[str]) -> Box | None:
    """Its user closes it; None where there is no Python to start, but an app.

    Args:
        preload: modules that a started process imports.
    """
    is_python = Path(sys.executable or "").name.startswith(("python", "pypy"))
    if not is_python or getattr(sys, "frozen", False):
        return None
    return Box(Zygote(preload) if sys.platform == "linux" else Starter(preload))
