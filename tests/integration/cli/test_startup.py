"""A command that was started without stdout or stderr runs as if nobody read them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.cli.startup import SETTING, SPINS, VARIABLE

_CLOSES = (
    "import os, sys; [os.close(int(n)) for n in {closed!r}]; os.execv(sys.argv[1], sys.argv[1:])"
)


def _started_without(closed: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p2ptrain", *argv]
    return subprocess.run(
        [sys.executable, "-c", _CLOSES.format(closed=closed), *command],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_without_stdout_the_error_still_stands_on_stderr(
    json_too: list[str], tmp_path: Path
) -> None:
    done = _started_without("01", "status", "--state-dir", str(tmp_path), *json_too)
    assert done.returncode == 1
    assert done.stderr.startswith("p2ptrain: error: p2ptrain is not running")
    assert done.stderr.count("\n") == 1


def test_without_stderr_stdout_has_the_json_lines_alone(tmp_path: Path) -> None:
    done = _started_without("2", "status", "--state-dir", str(tmp_path), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["event"] == "error"


def test_wrong_usage_is_not_reported_on_stdout() -> None:
    done = _started_without("2", "status", "--jsn")
    assert done.returncode == 2
    assert done.stdout == ""


on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


STARTED = """
import atexit, os
atexit.register(lambda: print(os.getpid(), os.environ.get("GLIBC_TUNABLES")))
from p2ptrain.__main__ import main
main()
"""


THREADS = """
import atexit
atexit.register(lambda: __import__("torch"))
from p2ptrain.__main__ import main
main()
"""


HEAP = """
import ctypes
from p2ptrain.process.host_process import keep_freed_memory

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


@on_glibc
def test_torch_reads_how_long_its_threads_spin() -> None:
    said = {n: v for n, v in os.environ.items() if n not in (SPINS, "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", THREADS, "join", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=said | {"OMP_DISPLAY_ENV": "verbose"},
    )
    assert f"{SPINS} = '1000'" in done.stderr
