"""A sample of what `tools/fuzz_operators.py` calls by the million."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz_operators import chosen, overloads

TOOL = Path("tools/fuzz_operators.py")


def test_every_operator_has_its_turn() -> None:
    names, found, number = overloads(), list[str](), 0
    assert len(names) > 1000
    while len(found) < len(names):
        found += chosen(names, 1, number)
        number += 1
    assert sorted(found) == names
    assert chosen(names, 1, 0) == found[: len(chosen(names, 1, 0))]
    assert chosen(names, 1, 0) != chosen(names, 1, number), "then others lie together"


@pytest.mark.skipif(sys.platform != "linux", reason="pages that nobody may touch")
def test_hostile_arguments_end_no_process() -> None:
    run = subprocess.run(
        [sys.executable, TOOL, "--seed", "35", "--calls", "2500"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "computed" in run.stdout
    assert "0 operators failed" in run.stdout
