"""The script of the first page for users is a job; it loads scikit-learn's digits."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from p2ptrain.cli.script import load_job

ROOT = Path(__file__).parents[2]


def test_the_first_script_is_a_job(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "user" / "start.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "digits.py"
    script.write_text(textwrap.dedent(block))
    job = load_job(str(script), [("hidden", "8")])
    assert job.total_steps() == 280
    assert job.model[0].out_features == 8
