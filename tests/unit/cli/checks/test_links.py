"""What the doctor says of the links that a member has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.checks.check import Severity
from p2ptrain.cli.checks.network import _link, links


@pytest.mark.parametrize(
    ("entry", "verdict", "said"),
    [
        ({"bytes_per_s": 11.7e6, "latency_s": 0.0012}, Severity.OK, "93.6 Mbit/s, 1.2 ms"),
        ({"bytes_per_s": 1.0e6, "latency_s": 0.003}, Severity.WARN, "8 Mbit/s, 3 ms"),
        ({"bytes_per_s": 11.7e6, "latency_s": 0.045}, Severity.WARN, "93.6 Mbit/s, 45 ms"),
        ({"error": "the link has ended"}, Severity.BAD, "does not work: the link has ended"),
    ],
)
def test_a_link_is_judged_by_rate_and_latency(
    entry: dict[str, Any], verdict: Severity, said: str
) -> None:
    found = _link({"name": "pi", "id": "00", **entry})
    assert (found.subject, found.verdict, found.found) == ("link to pi", verdict, said)
    assert bool(found.advice) == (verdict is not Severity.OK)


async def test_without_a_member_nothing_is_measured(tmp_path: Path) -> None:
    [found] = await links(tmp_path)
    assert found.verdict is Severity.OK
    assert found.found.startswith("not measured: p2ptrain is not running")
