"""Loading torch: seconds on a small device, a third of them spent looking for garbage in vain.

What is loaded stays until the process ends. So Python's garbage collector rests meanwhile, and
never looks through it later: that would stop a device of a fifth of a core for more than a second
each time, its heartbeats and measurements too. For the command line only: an app's objects are not
ours to keep. What it costs are some 8 MiB of garbage from the loading itself.

What is loaded is also shared with the process in which models of others run (`process.zygote`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.process.shared import fork_from_here
from p2ptrain.training.allocator import keep_freed_memory
from p2ptrain.training.background import in_background


@contextmanager
def loading() -> Iterator[None]:
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
    await in_background(_load_exporting if exporting else _load)


def _load() -> None:
    with loading():
        from p2ptrain.node import import_training

        import_training()
    fork_from_here()


def _load_exporting() -> None:
    _load()
    with loading():
        import torch.export._trace  # noqa: F401  # the first export would load it
