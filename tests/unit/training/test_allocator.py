"""What freed memory costs to take again; in processes of their own, as it cannot be undone."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from p2ptrain.training.allocator import keep_freed_memory

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
