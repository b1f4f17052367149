"""Text in columns, for commands whose answer is a short list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2ptrain.size_text import size_text


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
        _phrase(key, value)
        for key, value in values.items()
        if value is not None and not isinstance(value, Mapping | list | tuple)
    )


def _phrase(key: str, value: Any) -> str:
    name = key.removesuffix("_bytes").replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, int) and key.endswith("_bytes"):
        return f"{name} {size_text(value)}"
    return f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value}"
