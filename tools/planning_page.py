"""Runs the commands of docs/planning.md again and writes their output, rates and chart into it.

    python tools/planning_page.py

Only what the page shows after `$ p2ptrain plan` and `$ p2ptrain simulate` is replaced; an output
that ends in `...` stays cut to as many lines, and a command whose files are not in
examples/planning/ stays as it is. The planners' table gets their rates, and docs/planning.svg the
chart. The commands run in a copy of that folder.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"
CUT = "..."
PROMPT = "$ p2ptrain "
QUESTION = "plan --profile mnist_mobilenet.json --cluster household.json --batch-size 128"


def main() -> None:
    """Rewrite the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "examples" / "planning", folder, dirs_exist_ok=True)
        page = re.sub(
            r"```\n(\$ .*?)```", lambda m: _block(m[1], folder), PAGE.read_text(), flags=re.DOTALL
        )
        page = re.sub(
            r"^(\| `(\w+)` \| .* \| )\d+( samples/s)? \|$",
            lambda m: f"{m[1]}{_rate(m[2], folder)}{m[3] or ''} |",
            page,
            flags=re.MULTILINE,
        )
        PAGE.write_text(page)
        shutil.copy(folder / "round.svg", PAGE.with_suffix(".svg"))


def _block(text: str, folder: Path) -> str:
    """A code block whose commands are run again where their files are here."""
    parts = re.split(r"^(?=\$ )", text, flags=re.MULTILINE)
    return "```\n" + "".join(_command(part, folder) for part in parts if part) + "```"


def _command(text: str, folder: Path) -> str:
    first, *shown = text.rstrip("\n").split("\n")
    words = shlex.split(first.removeprefix(PROMPT))
    here = all(
        (folder / word).exists() for word in words if word.endswith(".json") and word != "plan.json"
    )
    if words[0] not in ("plan", "simulate") or not here:
        return text
    lines = _run(words, folder).rstrip("\n").split("\n")
    if shown[-1:] == [CUT]:
        lines = [*lines[: len(shown) - 1], CUT]
    ending = text[len(text.rstrip("\n")) :]
    return "\n".join([first, *lines]) + ending


def _rate(planner: str, folder: Path) -> str:
    plan = json.loads(_run([*QUESTION.split(), "--planner", planner, "--json"], folder))
    return f"{plan['predicted']['samples_per_s']:.0f}"


def _run(words: list[str], folder: Path) -> str:
    """What the command says, on stdout and stderr."""
    command = [sys.executable, "-m", "p2ptrain", *words]
    return subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


if __name__ == "__main__":
    main()
