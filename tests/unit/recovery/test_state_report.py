"""A state report travels, and what cannot be one is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.net import cbor
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.state_report import ReplayWindow, StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Version

_VERSIONS = st.builds(Version, st.integers(0, 2**40), st.integers(0, 2**40))
_HOLDINGS = st.builds(
    lambda first, size, *rest: StateEntry(first, first + size, *rest),
    st.integers(0, 60),
    st.integers(1, 4),
    _VERSIONS,
    st.sampled_from(StateKind),
    st.none() | _VERSIONS,
    st.none() | st.tuples(st.floats(0, 1), st.sampled_from(["float32", "float64"])),
)
_FULL = StateReport(
    "pi",
    3,
    (StateEntry(0, 4, Version(7, 3), StateKind.LIVE, Version(8, 3), (0.5, "float32")),),
    frozenset({"laptop"}),
    MemoryBudgets(1 << 30, 1 << 20),
    1 << 20,
    (("laptop", 1e7, 0.001),),
    {"times": {"1": [0.5]}},
    ReplayWindow(3, 5),
)


@given(st.lists(_HOLDINGS, max_size=6))
def test_holdings_travel(entries: list[StateEntry]) -> None:
    state_report = StateReport("pi", entries=tuple(entries))
    assert StateReport.from_bytes(state_report.to_bytes()) == state_report


def test_everything_travels() -> None:
    assert StateReport.from_bytes(_FULL.to_bytes()) == _FULL


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", 7),
        ("generation", -1),
        ("entries", [{"units": [0, 1]}]),
        ("entries", [7] * 1025),
        ("linked", [7]),
        ("speeds", [["laptop", 0.0, 0.0]]),
        ("logged", [3]),
        ("logged", [3, -1]),
        ("measured", 7),
    ],
)
def test_what_cannot_be_an_inventory_is_refused(key: str, value: Any) -> None:
    fields = {**cbor.loads(_FULL.to_bytes(), 1 << 20), key: value}
    with pytest.raises(ProtocolError):
        StateReport.from_bytes(cbor.dumps(fields))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("end", 0),
        ("kind", "torn"),
        ("version", [-1, 0]),
        ("ready", 8),
        ("coefficient", ["1", "float32"]),
    ],
)
def test_what_cannot_be_a_holding_is_refused(key: str, value: Any) -> None:
    fields = cbor.loads(_FULL.to_bytes(), 1 << 20)
    fields["entries"][0][key] = value
    with pytest.raises(ProtocolError):
        StateReport.from_bytes(cbor.dumps(fields))
