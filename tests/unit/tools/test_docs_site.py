"""What the documentation's site is made of; mkdocs itself is not needed for that."""

from __future__ import annotations

import re
from pathlib import Path

from tools import docs_site


def test_each_page_has_one_place_and_its_files_are_there(tmp_path: Path) -> None:
    docs_site.gather(tmp_path / "site")
    found = docs_site.navigation(tmp_path / "site")
    named = re.findall(r"'([\w/.-]+\.md)'", repr(found))
    pages = {page.relative_to(tmp_path / "site").as_posix() for page in tmp_path.rglob("*.md")}
    assert {"README.md", "docs/user/start.md", "CHANGELOG.md"} <= pages
    assert set(named) == pages
    assert len(named) == len(pages)
    for page in pages:
        text = (tmp_path / "site" / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#\s]+)", text)
        for link in [link for link in links if "://" not in link]:
            assert (tmp_path / "site" / page).parent.joinpath(link).exists(), (page, link)
