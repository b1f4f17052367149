"""A command that computes runs without the caches that keep freed memory in pieces."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from p2ptrain.cli.merging_heap import SETTING, VARIABLE, ensure

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

STARTED = """
import atexit, os
atexit.register(lambda: print(os.getpid(), os.environ.get("GLIBC_TUNABLES")))
from p2ptrain.__main__ import main
main()
"""
HEAP = """
import ctypes
from p2ptrain.training.allocator import keep_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]

keep_freed_memory()
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
blocks = [ctypes.c_void_p() for _ in range(100)]
library.malloc_trim(0)
before = library.mallinfo2()
for number, block in enumerate(blocks):
    library.posix_memalign(ctypes.byref(block), 64, 100_000 + 16 * number)
taken = library.mallinfo2()
for block in blocks:
    library.free(block)
after = library.mallinfo2()
print(taken.smblks, after.ordblks - before.ordblks)
"""


class Executed(list[tuple[str, list[str], Mapping[str, str]]]):
    """What would have been started, and returns, as the real one does not."""

    def __call__(self, path: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.append((path, command, environment))


def run(program: str, tunables: str | None, *words: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if tunables is not None:
        environment[VARIABLE] = tunables
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines()[-1].split()


@on_glibc
def test_freed_blocks_on_borders_merge_with_the_pieces_beside_them() -> None:
    assert run(HEAP, SETTING) == ["0", "0"]
    if tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 42):
        assert run(HEAP, "")[1] != "0"  # later ones merge by themselves


@on_glibc
def test_a_command_starts_itself_again_with_what_it_was_started_with() -> None:
    help_ = ("join", "--help")
    assert run(STARTED, None, *help_)[1] == SETTING
    other = "glibc.malloc.mxfast=64"
    assert run(STARTED, other, *help_)[1] == f"{other}:{SETTING}"
    assert run(STARTED, "glibc.malloc.tcache_count=3", *help_)[1] == "glibc.malloc.tcache_count=3"


def test_it_is_the_same_command_line_of_the_same_python(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "python", "-X", "dev", "-m", "p2ptrain", "train", "x.py")
    executed = Executed()
    ensure(["train", "x.py"], {"HOME": "/h"}, executed, is_glibc=True)
    again = [sys.executable, "-X", "dev", "-m", "p2ptrain", "train", "x.py"]
    assert executed == [(sys.executable, again, {"HOME": "/h", VARIABLE: SETTING})]


def started_as(monkeypatch: pytest.MonkeyPatch, *words: str, program: str = "p2ptrain") -> None:
    monkeypatch.setattr(sys, "orig_argv", [*words])
    monkeypatch.setattr(sys, "argv", [program, *words[-2:]])


@pytest.mark.parametrize(
    ("command", "environment", "is_glibc"),
    [
        (["status"], {}, True),
        ([], {}, True),
        (["join"], {}, False),
        (["join"], {VARIABLE: SETTING}, True),
    ],
)
def test_it_goes_on_where_nothing_would_change(
    monkeypatch: pytest.MonkeyPatch,
    command: Sequence[str],
    environment: Mapping[str, str],
    is_glibc: bool,
) -> None:
    started_as(monkeypatch, "p2ptrain", *command)
    executed = Executed()
    ensure(command, environment, executed, is_glibc=is_glibc)
    assert executed == []


def test_a_program_that_would_not_do_the_same_again_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executed = Executed()
    started_as(monkeypatch, "python", "my_own.py")
    ensure(["join", "--debug"], {}, executed, is_glibc=True)
    started_as(monkeypatch, "python", "-", "join", "--debug", program="-")
    ensure(["join", "--debug"], {}, executed, is_glibc=True)
    assert executed == []


def test_where_it_cannot_be_started_again_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "p2ptrain", "join")

    def fails(path: str, command: list[str], environment: Mapping[str, str]) -> None:
        raise FileNotFoundError(path)

    ensure(["join"], {}, fails, is_glibc=True)
