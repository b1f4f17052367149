"""What is said about copies of stages, as fields of frames: read strictly, as it was written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import VERSIONS_LIMIT, RoundOrder
from p2ptrain.messages.snapshots import (
    REASON_LIMIT,
    BackupAssignment,
    RetainSnapshots,
    SnapshotKept,
    SnapshotOffer,
)
from p2ptrain.net import cbor
from p2ptrain.recovery.state_report import StageCopy
from p2ptrain.recovery.version import Version

numbers = st.integers(0, 2**53)
versions = st.builds(Version, numbers, numbers)
units = st.tuples(st.integers(0, 1000), st.integers(1, 1000)).map(lambda p: (p[0], p[0] + p[1]))
copies = st.builds(lambda g, place, v: StageCopy(g, *place, v), numbers, units, versions)


def sent(fields: dict[str, Any]) -> dict[str, Any]:
    """What the other side gets to read."""
    received: dict[str, Any] = cbor.loads(cbor.dumps(fields), 4096)
    return received


@given(copies, numbers)
def test_an_offer_is_read_as_it_was_made(copy: StageCopy, nbytes: int) -> None:
    offer = SnapshotOffer("job", copy, nbytes)
    assert SnapshotOffer.read(sent(offer.fields())) == offer


@given(copies, st.none() | st.text("abc é", max_size=40))
def test_so_is_what_became_of_it(copy: StageCopy, failed: str | None) -> None:
    kept = SnapshotKept("job", copy, failed)
    assert SnapshotKept.read(sent(kept.fields())) == kept


@given(st.lists(versions, max_size=VERSIONS_LIMIT))
def test_so_are_the_versions_to_keep(named: list[Version]) -> None:
    keep = RetainSnapshots("job", tuple(named))
    assert RetainSnapshots.read(sent(keep.fields())) == keep


@given(st.lists(versions, max_size=VERSIONS_LIMIT), st.booleans())
def test_an_order_names_them_too(named: list[Version], offer: bool) -> None:
    shape = Round(4, RoundMode.TRAIN, 4, 32, 8)
    order = RoundOrder(shape, keep=True, stay=tuple(named), offer=offer)
    assert RoundOrder.read(sent(order.fields())) == order


@given(copies, st.text("abc0", max_size=64))
def test_so_is_another_keeper(copy: StageCopy, backup_peer: str) -> None:
    other = BackupAssignment("job", copy, backup_peer)
    assert BackupAssignment.read(sent(other.fields())) == other


def test_a_long_reason_is_cut_and_not_refused() -> None:
    kept = SnapshotKept("job", StageCopy(7, 0, 2, Version(3, 1)), "x" * 5000)
    assert SnapshotKept.read(sent(kept.fields())).failed == "x" * REASON_LIMIT


GOOD = {"job": "job", "generation": 7, "step": 3, "computed": 1, "first": 2, "end": 4, "bytes": 100}


@pytest.mark.parametrize(
    "wrong",
    [{"end": 2}, {"first": -1}, {"step": "3"}, {"computed": True}, {"bytes": None}, {"end": 4.0}],
    ids=str,
)
def test_a_malformed_offer_is_refused(wrong: dict[str, Any]) -> None:
    assert SnapshotOffer.read(GOOD) == SnapshotOffer("job", StageCopy(7, 2, 4, Version(3, 1)), 100)
    with pytest.raises(ProtocolError):
        SnapshotOffer.read({**GOOD, **wrong})


@pytest.mark.parametrize(
    "failed", [3, "x" * (REASON_LIMIT + 1), ["x"]], ids=["number", "long", "list"]
)
def test_a_malformed_reason_is_refused(failed: object) -> None:
    with pytest.raises(ProtocolError, match="failed"):
        SnapshotKept.read({**GOOD, "failed": failed})


@pytest.mark.parametrize(
    "named",
    [None, [[1]], [[1, 2, 3]], [[-1, 0]], ["1:0"], [[1, 0]] * (VERSIONS_LIMIT + 1)],
    ids=["none", "short", "long", "negative", "text", "many"],
)
def test_malformed_versions_are_refused(named: object) -> None:
    with pytest.raises(ProtocolError, match=r"version|step"):
        RetainSnapshots.read({"job": "job", "versions": named})
