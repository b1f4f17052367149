"""Scripts that a browser may start: those that were named, one at a time, and what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2ptrain.errors import UserError
from p2ptrain.page.scripts import OUTPUT_FILE, AllowedScripts

RUNS_IT = (sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[2])")
"""In place of p2ptrain."""


async def test_what_was_named_is_started_once_and_ends_with_the_member(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\nprint('trains', flush=True)\ntime.sleep(60)\n")
    async with AllowedScripts(tmp_path, [script], RUNS_IT) as scripts:
        for other in ("/etc/passwd", "train.py", f"{script}/../train.py", ""):
            with pytest.raises(UserError, match="has not allowed"):
                await scripts.start(other)
        await scripts.start(str(script))
        with pytest.raises(UserError, match="still runs"):
            await scripts.start(str(script))
    await scripts.ended()
    assert scripts.notes[0].text == "train.py was started from the page."


async def test_why_a_script_failed_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no data')\n")
    async with AllowedScripts(tmp_path, [script], RUNS_IT) as scripts:
        await scripts.start(str(script))
        await scripts.ended()
        assert scripts.notes[-1].text == f"train.py failed: no data ({tmp_path / OUTPUT_FILE})"
        await scripts.start(str(script))  # the first has ended
        await scripts.ended()
        script.unlink()
        with pytest.raises(UserError, match="not there any more"):
            await scripts.start(str(script))
