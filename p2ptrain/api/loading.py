"""Loads torch, without the garbage collector and shared with the box.

Loading takes seconds on a small device, a third of them in the garbage collector. What is loaded
stays until the process ends. So the collector rests meanwhile and never looks through it later:
that would stop a slow device, its heartbeats and measurements, for more than a second each time.
For the command line only: an app's objects are not ours to keep. It costs about 8 MiB of garbage.

What is loaded is shared with the process in which models of others run (`process.zygote`):

    load_training()  ─►  fork_from_here()  ─►  forked_box()     the command line's, one a process
    Node in an app   ─────────────────────►  started_box(...)   its own, started when it is needed
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.logs import get_logger
from p2ptrain.process.box import Box, Starter, Zygote
from p2ptrain.process.host_process import keep_freed_memory


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Everything that lives at the end is taken for what stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def load_training(*, exporting: bool = False) -> None:
    """What a member needs; for one that will export a model also torch's part for that.

    Before it joins: see `Node.__aenter__`.
    """
    keep_freed_memory()
    await run_in_background(_load_exporting if exporting else _load)


def _load() -> None:
    with collector_at_rest():
        import_training()
    fork_from_here()


def _load_exporting() -> None:
    _load()
    with collector_at_rest():
        import torch.export._trace  # noqa: F401  # the first export would load it


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


def import_training() -> None:
    """Import torch and the rooms that need it; seconds on a small device.

    torch.optim imports torch._dynamo when the first optimizer is made: rather now than in a job.
    """
    import torch._dynamo  # noqa: F401

    import p2ptrain.api.device_services  # noqa: F401
