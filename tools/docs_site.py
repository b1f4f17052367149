"""The documentation as a site: gathers its pages, puts them in order, and builds it.

    make docs          # into build/site, which works offline; fails where a link leads nowhere

The pages keep their places, so that their links work on the site as they do in the repository; the
navigation is docs/README.md, heading by heading, then what stands nowhere there. It needs
`pip install -e '.[docs]'`; `tests/unit/test_docs.py` checks links and headings without that.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

PLACE = ROOT / "build" / "docs"

PAGES = ("*.md", "docs/**/*", "examples/**/*", "tools/README.md")

INDEX = Path("docs/README.md")

_PAGE = re.compile(r"\[([^\]]+)\]\(([^)#:]+\.md)\)")

_FILE = re.compile(r"\]\(([^)#:\s]+)")

WORKER, ELSEWHERE = Path("tools/iframe_worker.js"), "https://unpkg.com/iframe-worker/shim"

Navigation = list[dict[str, Any]]


def gather(into: Path) -> None:
    """Copy the pages, and the files that they link to."""
    shutil.rmtree(into, ignore_errors=True)
    pages = {file for pattern in PAGES for file in ROOT.glob(pattern) if file.is_file()}
    linked = {
        (page.parent / link).resolve()
        for page in pages
        if page.suffix == ".md"
        for link in _FILE.findall(page.read_text(encoding="utf-8"))
    }
    for file in pages | {file for file in linked if file.is_file()}:
        place = into / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


def navigation(place: Path) -> Navigation:
    """The front page, the index's sections, the rest of the pages in `place`."""
    named: Navigation = [{"Home": "README.md"}]
    for heading, links in _sections((ROOT / INDEX).read_text(encoding="utf-8")):
        named.append({heading: [{text: path} for text, path in links]})
    known = set(re.findall(r"[\w/-]+\.md", repr(named)))
    pages = sorted(page.relative_to(place).as_posix() for page in place.rglob("*.md"))
    return [*named, {"The project": [page for page in pages if page not in known]}]


def _sections(index: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        heading, _, text = section.partition("\n")
        found = [(name, normpath(INDEX.parent / path)) for name, path in _PAGE.findall(text)]
        yield heading.strip(), found


def main() -> int:
    """Build it; a warning is an error."""
    from mkdocs.commands.build import build  # here: the order of pages can be tested without it
    from mkdocs.config import load_config

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    gather(PLACE)
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, nav=navigation(PLACE))
    build(config)
    bring_worker(Path(config.site_dir))
    return 0


def bring_worker(site: Path) -> None:
    """Search in pages opened as files needs a script that the theme loads from elsewhere."""
    place = site / "assets" / WORKER.name
    shutil.copyfile(ROOT / WORKER, place)
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(ELSEWHERE, f"{up}assets/{WORKER.name}"), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
