"""Text in columns, for commands whose answer is a short list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows` as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def words(values: Mapping[str, Any]) -> str:
    """`key value, key value`, without what is not set; underscores as spaces."""
    return ", ".join(
        f"{key.replace('_', ' ')} {_shown(value)}"
        for key, value in values.items()
        if value is not None and not isinstance(value, Mapping | list | tuple)
    )


def _shown(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
