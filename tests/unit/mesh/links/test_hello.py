"""Hellos, names and which of two links is kept: pure rules."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain._version import PROTOCOL_VERSION
from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.mesh.config import DEFAULT_PORT, parse_peer
from p2ptrain.mesh.discovery.addresses import HINTS_LIMIT, PROVEN_LIMIT, AddressBook, is_usable
from p2ptrain.mesh.identity_conflicts import free_name, must_rename
from p2ptrain.mesh.links.hello import (
    Hello,
    LinkAction,
    LinkRefusal,
    LinkSituation,
    between_instances,
    from_message,
    is_younger,
    judge_incoming,
    refusal_of,
    refused,
    to_message,
)
from p2ptrain.mesh.membership.core_events import MemberRecord
from p2ptrain.mesh.membership.core_messages import (
    Claim,
    MembershipKind,
    MembershipMessage,
    check_record,
    decode,
    encode,
)
from p2ptrain.net.fields import checked_name, peer_name, printable
from p2ptrain.net.message import Message
from p2ptrain.net.transport.dial import MAX_SECONDS, Backoff

HELLO = Hello("anna", "0011223344556677", 5.0, 47300, ("10.0.0.2",), "aa", "bb", {"threads": 4})
SMALL, GREAT = "1" * 64, "2" * 64


def test_a_hello_survives_the_wire() -> None:
    assert from_message(to_message(HELLO)) == HELLO


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", 5),
        ("instance", None),
        ("instance", "x" * 17),
        ("uptime_seconds", float("nan")),
        ("uptime_seconds", -1.0),
        ("uptime_seconds", True),
        ("port", 0),
        ("port", 65536),
        ("port", True),
        ("addresses", "10.0.0.2"),
        ("addresses", ["x"] * 9),
        ("addresses", [5]),
        ("addresses", ["\0"]),
        ("info", []),
        ("info", {"a": []}),
        ("info", {"a": "x" * 2000}),
        ("info", {"a": "\x1b[31m"}),
        ("version", 0),
        ("version", "1"),
    ],
)
def test_a_malformed_hello_is_refused(key: str, value: Any) -> None:
    fields = {**to_message(HELLO).fields, key: value}
    with pytest.raises(ProtocolError):
        from_message(Message("mesh.hello", fields))


def test_of_the_addresses_in_a_hello_those_count_that_can_be_dialled() -> None:
    told = ["a" * 64, "..", "nas.local", "10.0.0.2", "fe80::1%a..b", "fe80::1%eth0.7", "::"]
    fields = {**to_message(HELLO).fields, "addresses": told}
    theirs = from_message(Message("mesh.hello", fields))
    assert theirs.addresses == ("10.0.0.2", "fe80::1%eth0.7")


@pytest.mark.parametrize("scope", ["", "a" * 17, "a..b", ".", "\n", "é", "a\0"])
def test_an_interface_that_has_no_such_name_is_no_scope(scope: str) -> None:
    assert not is_usable((f"fe80::1%{scope}", 47300))
    assert is_usable(("fe80::1%wlp2s0", 47300))


def test_of_another_version_only_the_number_is_read() -> None:
    other = PROTOCOL_VERSION + 1
    theirs = from_message(Message("mesh.hello", {"version": other, "software": "9.9", "name": [1]}))
    assert (theirs.version, theirs.software) == (other, "9.9")


def test_names_from_peers_are_harmless() -> None:
    evil = "\x1b[2J../../etc\x00\u202egpj.exe"
    shown = from_message(to_message(replace(HELLO, name=evil))).name
    assert shown == "_[2J.._.._etc__gpj.exe"
    assert peer_name(" . ") == "unnamed"
    assert printable("a\nb", 10) == "a?b"


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("ノート\u3000パソコン", "ノート パソコン"),
        ("my\u00a0laptop", "my laptop"),
        ("a \u2003 b", "a b"),
        ("Zoe\u0308", "Zoë"),
    ],
)
def test_a_name_is_written_in_one_way_wherever_it_comes_from(typed: str, written: str) -> None:
    """And what a person may type, all others take: the hello, membership, trust."""
    assert checked_name(typed) == written
    assert peer_name(typed) == written
    record = MemberRecord("a", typed)
    (claim,) = decode(
        MembershipMessage, encode(MembershipMessage(MembershipKind.GOSSIP, (Claim(record),)))
    ).claims
    assert claim.record.name == written
    check_record(MemberRecord("a", written, info={"os": "ノート\u3000パソコン"}))


@pytest.mark.parametrize("name", ["", "  ", "a/b", "x" * 49, "a\tb", "."])
def test_bad_names_of_ones_own_are_said(name: str) -> None:
    with pytest.raises(OptionError):
        checked_name(name)


def test_refusals_survive_the_wire() -> None:
    said = refusal_of(refused(LinkRefusal.COPIED, HELLO))
    assert (said.reason, said.version) == (LinkRefusal.COPIED, PROTOCOL_VERSION)
    assert said.elsewhere == (("10.0.0.2", 47300),)
    with pytest.raises(ProtocolError):
        refusal_of(Message("mesh.refused", {"reason": "no", "version": 1, "software": ""}))


def _here(**changes: Any) -> LinkSituation:
    return replace(LinkSituation(SMALL, replace(HELLO, instance="own"), None, False), **changes)


def test_a_first_link_is_taken_and_another_version_is_not() -> None:
    assert judge_incoming(GREAT, HELLO, _here()).action is LinkAction.ACCEPT
    decision = judge_incoming(GREAT, replace(HELLO, version=PROTOCOL_VERSION + 1), _here())
    assert decision.refusal is LinkRefusal.VERSION


def test_of_crossed_dials_the_smaller_ids_wins() -> None:
    assert judge_incoming(GREAT, HELLO, _here(dialling=True)).refusal is LinkRefusal.CROSSED
    there = replace(_here(dialling=True), own_id=GREAT)
    assert judge_incoming(SMALL, HELLO, there).action is LinkAction.ACCEPT


def test_a_device_that_lost_its_link_gets_another() -> None:
    current = replace(HELLO, token="last")
    again = judge_incoming(GREAT, replace(HELLO, last_token="last"), _here(current=current))
    assert again.action is LinkAction.ACCEPT
    crossed = judge_incoming(GREAT, replace(HELLO, last_token=""), _here(current=current))
    assert crossed.refusal is LinkRefusal.CROSSED


def test_another_process_of_a_device_is_looked_into() -> None:
    new = replace(HELLO, instance="new")
    assert judge_incoming(GREAT, new, _here(current=HELLO)).action is LinkAction.ASK_OLD
    younger = between_instances(GREAT, HELLO, replace(new, uptime_seconds=1.0))
    assert younger.refusal is LinkRefusal.COPIED
    older = between_instances(GREAT, HELLO, replace(new, uptime_seconds=9.0))
    assert older.action is LinkAction.ACCEPT


def test_a_copy_of_ourselves_is_found_out() -> None:
    same = judge_incoming(SMALL, replace(HELLO, instance="own"), _here())
    assert same.refusal is LinkRefusal.OWN
    younger = replace(HELLO, instance="copy", uptime_seconds=1.0)
    assert judge_incoming(SMALL, younger, _here()).refusal is LinkRefusal.COPIED
    older = replace(HELLO, instance="copy", uptime_seconds=9.0)
    assert judge_incoming(SMALL, older, _here()).action is LinkAction.STOP_SELF


@given(one=st.floats(0, 1e6), other=st.floats(0, 1e6))
def test_exactly_one_of_two_gives_way(one: float, other: float) -> None:
    mine, theirs = replace(HELLO, uptime_seconds=one), replace(HELLO, uptime_seconds=other)
    assert is_younger(mine, SMALL, theirs, GREAT) != is_younger(theirs, GREAT, mine, SMALL)
    assert must_rename(mine, SMALL, theirs, GREAT) != must_rename(theirs, GREAT, mine, SMALL)


def test_names_get_the_smallest_free_number() -> None:
    assert free_name("pi", set()) == "pi"
    assert free_name("pi", {"pi"}) == "pi-2"
    assert free_name("pi", {"pi", "pi-2", "pi-4"}) == "pi-3"


def test_hints_never_push_out_what_was_proven() -> None:
    book = AddressBook()
    book.prove([("10.0.0.2", 1)])
    for number in range(100):
        book.add_hints([(f"10.1.0.{number}", 1)])
    assert ("10.0.0.2", 1) in book.all()
    assert book.all()[0] == ("10.1.0.99", 1)
    assert len(book.all()) == HINTS_LIMIT + 1
    for number in range(100):
        book.prove([(f"10.2.0.{number}", 1)])
    assert len(book.proven) == PROVEN_LIMIT


@pytest.mark.parametrize("address", [("nas", 1), ("224.0.0.1", 1), ("0.0.0.0", 1), ("10.0.0.1", 0)])
def test_unusable_addresses_are_dropped(address: tuple[str, int]) -> None:
    book = AddressBook()
    book.add_hints([address])
    assert not book.prove([address])
    assert book.all() == []


def test_pauses_grow_to_a_limit_and_start_again() -> None:
    backoff = Backoff(Random(1))
    pauses = [backoff.next_seconds() for _ in range(40)]
    assert 0.1 <= pauses[0] <= 0.2
    assert all(pause <= MAX_SECONDS for pause in pauses)
    assert pauses[-1] >= MAX_SECONDS / 2
    backoff.reset()
    assert backoff.next_seconds() <= 0.2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nas", ("nas", DEFAULT_PORT)),
        ("192.168.1.20:5000", ("192.168.1.20", 5000)),
        ("fe80::1", ("fe80::1", DEFAULT_PORT)),
        ("[fe80::1]:5000", ("fe80::1", 5000)),
        ("[fe80::1]", ("fe80::1", DEFAULT_PORT)),
    ],
)
def test_peers_are_read_as_people_write_them(text: str, expected: tuple[str, int]) -> None:
    assert parse_peer(text) == expected


@pytest.mark.parametrize("text", ["", ":5000", "nas:0", "nas:70000", "nas:x", "[::1]:x"])
def test_unreadable_peers_are_said(text: str) -> None:
    with pytest.raises(OptionError, match="--peer"):
        parse_peer(text)
