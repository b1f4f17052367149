"""Both scripts of each pair in docs/user/coming_from.md run, and train the same."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "user" / "coming_from.md"


def scripts(heading: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_a_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = scripts("Hugging Face's Trainer")
    found: list[dict[str, Any]] = []
    for script in (theirs, ours):
        Path("script.py").write_text(script, encoding="utf-8")
        found.append(runpy.run_path("script.py"))
    curves = [
        [line[key] for line in names["trainer"].state.log_history for key in line if "loss" in key]
        for names in found
    ]
    assert len(curves[0]) == 8
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert (tmp_path / "out" / "best" / "model.safetensors").exists()
    # what differs is what the page says: the import, and how the household trains
    differing = set(ours.splitlines()) - set(theirs.splitlines())
    assert len(differing) == 4
