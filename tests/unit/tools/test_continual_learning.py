"""When learning on is what it was to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.continual_learning import Found, Trial, report

GOOD = Found(0.92, -9, "too little: 4 bytes missing", (0.7, 0.915), (700 << 20,) * 3)


def test_all_three_are_needed() -> None:
    assert GOOD.holds
    assert "as it should be" in report(Trial(800 << 20, 64, 2), GOOD).splitlines()[-1]


@pytest.mark.parametrize(
    "other",
    [
        replace(GOOD, alone=0),
        replace(GOOD, alone=1),
        replace(GOOD, refused=""),
        replace(GOOD, together=(0.95, 0.9)),
    ],
)
def test_none_of_them_may_be_missing(other: Found) -> None:
    assert not other.holds
    assert "NOT as it should be" in report(Trial(800 << 20, 64, 2), other)
