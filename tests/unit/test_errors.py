"""Sizes as people read them."""

from __future__ import annotations

import pytest

from p2ptrain.errors import size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (229605120, "230 MB"),
        (999_600_000, "1 GB"),
        (1073938432, "1.07 GB"),
        (5.5e12, "5.5 TB"),
        (1.2e16, "12,000 TB"),
    ],
)
def test_three_digits_and_a_unit(size_bytes: float, text: str) -> None:
    assert size_text(size_bytes) == text
