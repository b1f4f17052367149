"""What the pages say is so: their links, their commands, and every event with its keys."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from p2ptrain.cli.main import build_parser
from p2ptrain.observe import events as ev
from p2ptrain.observe.events import Event

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("kind", Event.__subclasses__(), ids=lambda kind: kind.event)
def test_every_event_stands_in_its_page_with_its_keys(kind: type[Event]) -> None:
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind.event}` |")]
    keys = re.findall(r"`(\w+)`", row.split("|")[2])
    assert keys == [ev.name(field) for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_ones_that_exist(page: Path) -> None:
    """Each line `p2ptrain ...` of a code block, without what stands for something else."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.M)
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines()]
    for words in lines:
        if words[:1] == ["p2ptrain"]:
            build_parser().parse_args(words[1:])
