"""Both scripts of each pair in docs/user/coming_from*.md run, and train the same."""

from __future__ import annotations

import re
import runpy
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

ONE_PROCESS = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
"""What torchrun sets."""

PAGES = sorted((Path(__file__).parents[2] / "docs" / "user").glob("coming_from*.md"))


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one.getsockname()[1]


def scripts(heading: str) -> list[str]:
    whole = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    text = whole.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("heading", ["A plain loop", "Accelerate", "DistributedDataParallel"])
def test_a_loop(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for script in scripts(heading):
        Path("script.py").write_text(script, encoding="utf-8")
        for name, value in ONE_PROCESS.items():
            monkeypatch.setenv(name, value)
        with free_port() as port:
            monkeypatch.setenv("MASTER_PORT", str(port))
        losses = runpy.run_path("script.py")["losses"]
        found.append((losses, torch.load("model.pt")))
    (theirs, weights), (ours, trained) = found
    assert len(ours) == 9
    assert ours == theirs
    assert all(torch.equal(trained[name], weights[name]) for name in weights)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_module_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = scripts("Lightning")
    for name, script in {"theirs": theirs, "ours": ours}.items():
        Path(f"{name}.py").write_text(script, encoding="utf-8")
        runpy.run_path(f"{name}.py")
        Path("model.pt").rename(f"{name}.pt")
    weights, trained = torch.load("theirs.pt"), torch.load("ours.pt")
    assert weights
    assert all(torch.equal(trained[name], weights[name]) for name in weights)
    differing = set(ours.splitlines()) - set(theirs.splitlines())
    assert len(differing) == 3


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
