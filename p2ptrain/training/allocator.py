"""The C library's allocator, set for a thread that takes and frees the same blocks for hours.

As it comes, glibc gives a large block back to the kernel as soon as it is freed, or the end of its
heap (`M_MMAP_THRESHOLD`, `M_TRIM_THRESHOLD`), and gives threads heaps of 64 MiB of their own that
it unmaps whenever one is empty, whatever the thresholds. Training frees all activations of a
micro-batch and takes them again for the next one, so each would pay for every page anew: the kernel
must find it and fill it with zeros. `tools/allocator.py` measures what is gained.

Elsewhere (musl, macOS, Windows) nothing is changed.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h

TRIM_THRESHOLD_BYTES = (1 << 31) - 1
"""mallopt's largest. Lowering it gives memory back between micro-batches, to be taken again."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's largest in all its versions. Blocks beyond it come from the kernel each time: raising it
would keep holes where they once lay."""


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process, until `trim_heap` gives it back.

    All threads that have no heap yet share one from then on, so call it before any is started: an
    ended thread's heap goes to the next one.

    Returns:
        Whether the C library is one that can be told so.
    """
    library = _glibc()
    if library is None:
        return False
    wanted = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
    )
    taken = [library.mallopt(option, value) == 1 for option, value in wanted]
    return all(taken)


def trim_heap() -> None:
    """Give memory back that the C library keeps for later, so that it counts as available."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """None where the process runs on another C library."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None
