"""What p2ptrain changes in a process, and that it can be refused; each in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from p2ptrain.process import host_process
before = sys.getswitchinterval()
if sys.argv[1] == "refused":
    host_process.leave_alone()
kept, apart = host_process.keep_freed_memory(), host_process.take_apart(4 << 20)
host_process.switch_often()
print(kept, apart, sys.getswitchinterval() == before, "torch" in sys.modules)
"""


def said(how: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    return ran.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_process_is_changed() -> None:
    assert said("allowed") == ["True", "True", "False", "False"]


def test_an_app_can_refuse_it() -> None:
    assert said("refused") == ["False", "False", "True", "False"]
