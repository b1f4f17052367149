"""What freed memory costs to take again; in processes of their own, as it cannot be undone."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from p2ptrain.training.allocator import (
    LEARNING_ROUNDS,
    LEAST_CREEP_BYTES,
    Creep,
    keep_freed_memory,
)

MIB = 1 << 20
BLOCK_BYTES = 20 << 20
PROGRAM = f"""
import resource, sys, threading
from p2ptrain.training.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def take_and_free():
    blocks = [b"x" * {BLOCK_BYTES} for _ in range(4)]

def work():
    take_and_free()
    before = faults()
    take_and_free()
    print(faults() - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def faults_when_taken_again(way: str) -> int:
    command = [sys.executable, "-c", PROGRAM, way]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_thread_takes_its_freed_blocks_again_without_the_kernel() -> None:
    assert faults_when_taken_again("kept") < 100
    # The kernel may give large pages, of which few are needed, so this is only a lower bound.
    assert faults_when_taken_again("as it comes") > 100


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    assert not keep_freed_memory()


def test_windows_has_no_library_of_that_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: object) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert not keep_freed_memory()


BESIDE = """
import ctypes, torch
from p2ptrain.training.allocator import beside_the_heap, keep_freed_memory


class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def from_kernel_bytes():
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Info
    return library.mallinfo2().hblkhd


assert keep_freed_memory()
before = from_kernel_bytes()
rows = [torch.ones(2 << 20)]  # 8 MiB
assert from_kernel_bytes() == before
with beside_the_heap():
    rows += [torch.ones(2 << 20), torch.ones(16)]
assert (8 << 20) < from_kernel_bytes() - before < (9 << 20)
rows.append(torch.ones(2 << 20))
del rows[1]
assert from_kernel_bytes() == before
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_can_lie_beside_the_heap_and_leave_no_hole() -> None:
    subprocess.run([sys.executable, "-c", BESIDE], check=True)


LEARNT = (0,) * (LEARNING_ROUNDS - 1)
"""The other rounds that are learnt from."""


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((300, *LEARNT, 295, 330, 331, 300, *LEARNT, 330, 400, 250, *LEARNT, 276), [331, 400, 276]),
        ((100, *LEARNT, 112, 113, 100, *LEARNT, 95, 112, 113), [113, 113]),
        ((300, 600, 300, 900, 300, 300, 300, 900, 300, 989, 990, 991), [991]),
    ],
    ids=["a tenth", "no less than 12 MiB", "the most of the first rounds is needed"],
)
def test_what_has_crept_up_is_given_back_and_what_rounds_need_is_not(
    ends: tuple[int, ...], expected: list[int]
) -> None:
    """What has come to stay is given back for once: then it is what rounds end with."""
    used, given = [0], []
    creep = Creep(lambda: used[0], lambda: given.append(used[0] // MIB))
    for now in ends:
        used[0] = now * MIB
        creep.round_ended()
    assert LEAST_CREEP_BYTES == 12 * MIB
    assert given == expected
