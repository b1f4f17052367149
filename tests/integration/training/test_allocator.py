"""What freed memory costs to take again; in processes of their own, as it cannot be undone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BLOCK_BYTES = 20 << 20
PROGRAM = f"""
import resource, sys, threading
from p2ptrain.process.host_process import keep_freed_memory

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


BESIDE = """
import ctypes, torch
from p2ptrain.process.host_process import beside_the_heap
from p2ptrain.process.host_process import keep_freed_memory


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
