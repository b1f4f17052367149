"""The page of messages is what the declarations say."""

from __future__ import annotations

from tools.protocol_tables import PAGE, page


def test_the_page_is_made_from_the_declarations() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.protocol_tables"
    assert "`generation.prepare` | needed: ([compute_bytes: int 0 to 2^63], " in page()
