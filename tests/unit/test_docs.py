"""What the pages say is so: their links, their commands, and every event with its keys."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from p2ptrain import events
from p2ptrain.cli.main import build_parser
from p2ptrain.cli.usage import Parser
from p2ptrain.events import Event

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_find_their_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    missing = [f"{t}#{a}" for t, a in links if a not in anchors(page.parent / t if t else page)]
    assert not missing


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_page_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []


def test_files_that_the_glossary_names_exist() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert named
    assert not [name for name in named if not (ROOT / "p2ptrain" / name).exists()]


def test_pages_that_the_code_names_exist() -> None:
    files = [f for folder in ("p2ptrain", "tools", "tests") for f in (ROOT / folder).rglob("*.py")]
    named = {n for f in files for n in re.findall(r"docs/[\w/]+\.md", f.read_text("utf-8"))}
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("kind", Event.__subclasses__(), ids=lambda kind: kind.event)
def test_every_event_stands_in_its_page_with_its_keys(kind: type[Event]) -> None:
    page = (ROOT / "docs" / "user" / "events.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind.event}` |")]
    keys = re.findall(r"`(\w+)`", row.split("|")[2])
    assert keys == [events.name(field) for field in dataclasses.fields(kind)]


@functools.cache
def parser() -> Parser:
    return build_parser()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_ones_that_exist(page: Path) -> None:
    """Each line `p2ptrain ...` of a code block, without what stands for something else."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.M)
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines()]
    for words in lines:
        if words[:1] == ["p2ptrain"]:
            parser().parse_args(words[1:])
