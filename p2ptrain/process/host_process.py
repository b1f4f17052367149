"""What p2ptrain changes in the process that it runs in: all of it, and how to refuse it.

An app that trains is a guest's host: these settings belong to the whole process, and stay.

    mallopt                 memory that was freed stays with the process, in one heap: training
                            takes and frees the same memory in every micro-batch (glibc only)
    sys.setswitchinterval   threads take turns every 0.2 ms, not every 5 ms: a message waits for
                            the thread that computes

`leave_alone()`, or `p2ptrain.Node(changes_process=False)`, refuses both, for the rest of the
process; training is slower then and needs more memory than plans expect. `threads=` sets torch's
threads (`torch.set_num_threads`), and only that does. Nothing else is changed: not the garbage
collector, no signal handlers, no standard streams, no environment, no default of torch. (The
commands of `p2ptrain` are processes of their own and do more: `p2ptrain.api.loading`.)
"""

from __future__ import annotations

import ctypes
import importlib
import sys

SWITCH_SECONDS = 0.0002
"""For how long another thread keeps the interpreter that this one waits for; of the process."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h

_M_MXFAST = 1

TRIM_THRESHOLD_BYTES = (1 << 31) - 1
"""mallopt's largest. Lowering it gives memory back between micro-batches, to be taken again."""

MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's largest in all its versions. Blocks beyond it come from the kernel each time: raising it
would keep holes where they once lay."""


class _Permission:
    def __init__(self) -> None:
        self.is_given = True  # until an app says otherwise


_permission = _Permission()


def leave_alone() -> None:
    """Change nothing from now on in this process; what was changed before stays."""
    _permission.is_given = False


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process, until `allocator.trim_heap` gives it back.

    All threads that have no heap yet share one from then on, so call it before any is started: an
    ended thread's heap goes to the next one.

    Returns:
        Whether the C library has these settings, and they may be changed.
    """
    library = glibc()
    if library is None or not _permission.is_given:
        return False
    wanted = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_MXFAST, 0),
    )
    taken = [library.mallopt(option, value) == 1 for option, value in wanted]
    return all(taken)


def take_apart(least_bytes: int) -> bool:
    """Blocks of so many bytes and more come from the kernel, each alone; whether that may be."""
    library = glibc()
    if library is None or not _permission.is_given:
        return False
    library.mallopt(_M_MMAP_THRESHOLD, least_bytes)
    return True


def switch_often() -> None:
    """Threads take turns more often than they would."""
    if _permission.is_given:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


def use_threads(count: int) -> None:
    """torch's threads, for all of the process; the user asked for that."""
    importlib.import_module("torch").set_num_threads(count)  # planners need neither


def glibc() -> ctypes.CDLL | None:
    """None where the process runs on another C library."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None
