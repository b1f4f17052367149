"""The parts of membership: formulas, bookkeeping, wire schema."""

from __future__ import annotations

from random import Random

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import MemberRecord
from p2ptrain.mesh.membership.core_messages import (
    Claim,
    MembershipKind,
    MembershipMessage,
    decode,
    encode,
)
from p2ptrain.mesh.membership.dissemination import BroadcastQueue
from p2ptrain.mesh.membership.failure_detector import LocalHealth
from p2ptrain.mesh.membership.probing import Prober
from p2ptrain.mesh.membership.suspicion import Suspicion, group_factor, suspicion_timeout
from p2ptrain.net.fields import peer_name

# -- suspicion ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confirmations", "expected", "seconds"),
    [(0, 0, 2.0), (0, 2, 3.0), (1, 2, 2.369), (2, 2, 2.0), (9, 2, 2.0), (0, 1, 3.0), (1, 1, 2.0)],
)
def test_suspicion_timeout(confirmations: int, expected: int, seconds: float) -> None:
    assert suspicion_timeout(confirmations, expected, 2.0, 3.0) == pytest.approx(seconds, abs=1e-3)


@given(st.integers(0, 8), st.integers(0, 8))
def test_confirmations_never_lengthen_a_suspicion(confirmations: int, expected: int) -> None:
    now = suspicion_timeout(confirmations, expected, 2.0, 3.0)
    later = suspicion_timeout(confirmations + 1, expected, 2.0, 3.0)
    assert 2.0 <= later <= now <= 3.0


@pytest.mark.parametrize(("members", "factor"), [(1, 1), (8, 1), (10, 1), (100, 2), (1000, 3)])
def test_large_groups_get_more_time(members: int, factor: float) -> None:
    assert group_factor(members) == pytest.approx(factor)


def test_the_same_accuser_counts_once() -> None:
    suspicion = Suspicion(0.0, 2, (2.0, 3.0))
    assert suspicion.confirm(("a",))
    assert suspicion.deadline == 3.0
    assert not suspicion.confirm(("a", "a"))
    assert suspicion.confirm(("b", "c"))
    assert suspicion.deadline == 2.0


def test_accusers_are_bounded() -> None:
    suspicion = Suspicion(0.0, 2, (2.0, 3.0))
    suspicion.confirm(tuple(f"m{number}" for number in range(99)))
    assert len(suspicion.accusers) == Suspicion.ACCUSERS_LIMIT


def test_a_pause_moves_the_deadline_and_grants_grace() -> None:
    suspicion = Suspicion(0.0, 0, (2.0, 3.0))
    suspicion.pause(1.5, not_before=1.9)
    assert suspicion.deadline == 3.5
    suspicion.pause(0.0, not_before=9.0)
    assert suspicion.deadline == 9.0


# -- local health -------------------------------------------------------------------------


def test_lateness_is_a_freeze_only_beyond_the_threshold() -> None:
    health = LocalHealth(score_limit=2, late_tick_seconds=0.1)
    assert health.frozen_seconds(due=1.0, now=1.09) == 0.0
    assert health.frozen_seconds(due=1.0, now=1.5) == 0.5
    assert health.multiplier == 2


def test_the_score_stays_within_its_bounds() -> None:
    health = LocalHealth(score_limit=2, late_tick_seconds=0.1)
    health.reward()
    assert health.score == 0
    health.penalise(7)
    assert health.score == 2


# -- broadcasts ---------------------------------------------------------------------------


def claim(id_: str, incarnation: int = 1) -> Claim:
    return Claim(MemberRecord(id_, f"device {id_}", incarnation))


def test_news_is_sent_once_and_newest_first() -> None:
    news = BroadcastQueue(limit_factor=3)
    news.put(claim("x"))
    news.put(claim("y"), informed=["a"])
    assert [c.record.id for c in news.take("b", 3000)] == ["y", "x"]
    assert news.take("b", 3000) == ()
    assert [c.record.id for c in news.take("a", 3000)] == ["x"]


def test_newer_news_replaces_older() -> None:
    news = BroadcastQueue(limit_factor=3)
    news.put(claim("x", 1))
    news.take("b", 3000)
    news.put(claim("x", 2))
    assert [c.record.incarnation for c in news.take("b", 3000)] == [2]
    assert len(news) == 1


def test_news_that_does_not_fit_waits() -> None:
    news = BroadcastQueue(limit_factor=3)
    news.put(claim("x"))
    assert news.take("b", 10) == ()
    assert news.uninformed(["b", "x"]) == ["b"]
    assert len(news.take("b", 3000)) == 1


def test_news_sent_to_all_is_dropped() -> None:
    news = BroadcastQueue(limit_factor=3)
    news.put(claim("x"))
    for peer in "ab":
        news.take(peer, 3000)
    news.prune(["a", "b", "c"])
    assert len(news) == 1
    news.take("c", 3000)
    news.prune(["a", "b", "c"])
    assert len(news) == 0


def test_in_large_groups_each_tells_a_logarithmic_number() -> None:
    news = BroadcastQueue(limit_factor=3)
    news.put(claim("x"))
    peers = [f"m{number}" for number in range(1000)]
    told = 0
    while news:
        news.take(peers[told], 3000)
        told += 1
        news.prune(peers)
    assert told == 30


# -- probing ------------------------------------------------------------------------------


def test_every_member_is_probed_within_two_rounds() -> None:
    prober = Prober(Random(3), relays_limit=4)
    members = list("abcdef")
    targets = [prober.next_target(members) for _ in range(60)]
    for first in range(60 - 11):
        assert set(targets[first : first + 11]) == set(members)


def test_who_is_gone_is_not_probed() -> None:
    prober = Prober(Random(3), relays_limit=4)
    prober.next_target(list("abc"))
    assert {prober.next_target(["a"]) for _ in range(5)} == {"a"}
    assert prober.next_target([]) is None


def test_only_the_asked_may_answer() -> None:
    prober = Prober(Random(3), relays_limit=4)
    number = prober.start("b", 0.0, 0.2)
    assert prober.answered(number, "z") is None
    assert prober.answered(number, "b") is not None
    assert prober.answered(number, "b") is None


def test_relays_are_bounded() -> None:
    prober = Prober(Random(3), relays_limit=2)
    assert prober.start_relay("a", 1, "b", 0.2) is not None
    assert prober.start_relay("a", 2, "b", 0.3) is not None
    assert prober.start_relay("a", 3, "b", 0.2) is None
    assert [relay.sequence for relay in prober.pop_relays(now=0.25)] == [1]
    assert [relay.sequence for relay in prober.pop_relays(target="b")] == [2]


# -- wire ---------------------------------------------------------------------------------

_names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=52).map(peer_name)
_ids = st.text("0123456789abcdef", min_size=1, max_size=64)
_info = st.dictionaries(
    _ids.map(lambda text: text[:8]),
    st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, allow_infinity=False),
    max_size=4,
)
_records = st.builds(
    MemberRecord,
    id=_ids,
    name=_names,
    incarnation=st.integers(0, 1 << 48),
    state=st.sampled_from(MemberState),
    info=_info,
    instance=_ids,
) | st.builds(
    MemberRecord, id=_ids, name=_names, state=st.just(MemberState.DEAD), certain=st.booleans()
)
_claims = st.builds(Claim, _records, st.lists(_ids, max_size=4).map(tuple))
_messages = st.one_of(
    st.builds(
        MembershipMessage, st.just(MembershipKind.GOSSIP), st.lists(_claims, max_size=3).map(tuple)
    ),
    st.builds(
        MembershipMessage,
        st.just(MembershipKind.REQUEST),
        sequence=st.integers(0, 1 << 53),
        target=_ids,
    ),
    st.builds(
        MembershipMessage,
        st.just(MembershipKind.SYNC),
        digest=st.integers(0, (1 << 64) - 1),
        answer=st.booleans(),
    ),
)
_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(_messages)
def test_messages_survive_cbor(message: MembershipMessage) -> None:
    assert decode(MembershipMessage, cbor2.loads(cbor2.dumps(encode(message)))) == message


@settings(max_examples=30, deadline=None)
@given(_junk)
def test_nonsense_is_a_protocol_error(payload: object) -> None:
    with pytest.raises(ProtocolError):
        decode(MembershipMessage, payload)


@settings(max_examples=30, deadline=None)
@given(_messages, st.data())
def test_a_mutated_message_is_refused_or_sane(
    message: MembershipMessage, data: st.DataObject
) -> None:
    payload = encode(message)
    place = payload
    if payload["claims"] and data.draw(st.booleans()):
        place = payload["claims"][0]
    key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(_junk)
    try:
        decoded = decode(MembershipMessage, payload)
    except ProtocolError:
        return
    assert decode(MembershipMessage, encode(decoded)) == decoded


@pytest.mark.parametrize(
    "change",
    [
        {"claims": [{}] * 65},
        {"claims": "x"},
        {"kind": "shout"},
        {"kind": 7},
        {"sequence": True},
        {"sequence": -1},
        {"sequence": 1 << 60},
        {"extra": 1},
    ],
)
def test_bad_fields_are_refused(change: dict[str, object]) -> None:
    payload = encode(MembershipMessage(MembershipKind.PING, sequence=1)) | change
    with pytest.raises(ProtocolError):
        decode(MembershipMessage, payload)


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": "a\n"},
        {"id": "ä"},
        {"name": 5},
        {"inc": (1 << 64) - 1},
        {"inc": 1.0},
        {"state": "undead"},
        {"info": {"k": [1]}},
        {"info": {"k": float("nan")}},
        {"info": {"k": 1 << 64}},
        {"info": {"k": True}},
        {"info": {7: 1}},
        {"info": {"\x1b[31m": 1}},
        {"info": {str(number): 1 for number in range(33)}},
        {"info": {str(number): "x" * 200 for number in range(6)}},
        {"run": None},
        {"by": ["a"] * 5},
        {"by": [1]},
        {"sure": True},
        {"sure": 1, "state": "dead"},
    ],
)
def test_bad_claims_are_refused(change: dict[str, object]) -> None:
    payload = encode(MembershipMessage(MembershipKind.GOSSIP, (claim("a"),)))
    payload["claims"][0] |= change
    with pytest.raises(ProtocolError):
        decode(MembershipMessage, payload)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        *(("../a", "_a"), (" anna. ", "anna"), ("...", "unnamed"), ("x" * 65, "x" * 52)),
        ("\x1b[31m", "_[31m"),
    ],
)
def test_a_name_that_no_device_may_have_is_replaced(told: str, kept: str) -> None:
    """Others get it in trust records, and end the link over one that none may have."""
    payload = encode(MembershipMessage(MembershipKind.GOSSIP, (claim("a"),)))
    payload["claims"][0]["name"] = told
    (read,) = decode(MembershipMessage, payload).claims
    assert read.record.name == kept
