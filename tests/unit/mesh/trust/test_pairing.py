"""The pairing state machine: right codes pair, nothing else does, whichever device sits between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain._version import PROTOCOL_VERSION
from p2ptrain.errors import Error, NotPaired, PairingError, ProtocolError, VersionMismatch
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.trust import pairing
from p2ptrain.mesh.trust.pairing import (
    PairedDevice,
    PairingClient,
    PairingServer,
    PairingWindowClosed,
    PakeSide,
    Spake2,
    WrongCode,
    refusal,
)
from p2ptrain.net import cbor
from tests.support.thorough import examples_of

CODE = "12345678"
Tamper = Callable[[int, bytes], bytes]


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    root: Path = tmp_path_factory.mktemp("devices")
    return [load_or_create(StateFolder(root / name)) for name in ("anna", "bert", "mallory")]


@dataclass
class Outcome:
    """What each side would store, and the messages that passed."""

    client: PairedDevice | None = None
    server: PairedDevice | None = None


def run(
    client: PairingClient,
    server: PairingServer,
    code: str,
    *,
    upto: int = 6,
    tamper: Tamper | None = None,
) -> Outcome:
    """Pass at most `upto` messages between the two; `tamper` may change each (numbered from 1)."""
    change = tamper or (lambda _number, message: message)
    outcome = Outcome()
    steps: list[Callable[[bytes], bytes]] = [
        lambda _: client.hello(),
        lambda m: server.hello(m, code),
        client.confirm,
        server.confirm,
        client.done,
    ]
    message = b""
    for number, step in enumerate(steps, 1):
        if number > upto:
            return outcome
        message = change(number, step(message))
    if upto >= 5:
        outcome.server, message = server.done(message)
        message = change(6, message)
    if upto >= 6:
        outcome.client = client.finished(message)
    return outcome


def pair(
    identities: list[Identity], client_code: str = CODE, seen: Identity | None = None
) -> tuple[PairingClient, PairingServer]:
    anna, bert = identities[:2]
    seen_certificate = (seen or bert).certificate_der
    return PairingClient(anna, "anna", client_code, seen_certificate), PairingServer(bert, "bert")


def test_the_right_code_pairs_both(identities: list[Identity]) -> None:
    outcome = run(*pair(identities), CODE)
    assert outcome.client == PairedDevice(identities[1].certificate_der, "bert")
    assert outcome.server == PairedDevice(identities[0].certificate_der, "anna")


def test_a_wrong_code_is_a_wrong_try_of_the_server(identities: list[Identity]) -> None:
    client, server = pair(identities, "87654321")
    with pytest.raises(WrongCode):
        run(client, server, CODE)


def test_an_attempt_allows_one_guess(identities: list[Identity]) -> None:
    client, server = pair(identities, "87654321")
    confirm = client.confirm(server.hello(client.hello(), CODE))
    with pytest.raises(WrongCode):
        server.confirm(confirm)
    with pytest.raises(ProtocolError, match="one confirmation"):
        server.confirm(confirm)


@pytest.mark.parametrize("upto", range(1, 5))
def test_breaking_off_before_the_fifth_message_stores_nothing(
    identities: list[Identity], upto: int
) -> None:
    """S10: breaking off before the fifth message stores nothing."""
    outcome = run(*pair(identities), CODE, upto=upto)
    assert outcome.client is None
    assert outcome.server is None


def test_after_a_break_at_the_end_a_retry_pairs_both(identities: list[Identity]) -> None:
    """S10: after a break at the end a retry pairs both."""
    broken = run(*pair(identities), CODE, upto=5)
    assert broken.client is None
    retried = run(*pair(identities), CODE)
    assert retried.client is not None
    assert retried.server == broken.server


def test_a_relay_that_ends_tls_on_both_sides_pairs_no_device(identities: list[Identity]) -> None:
    """The client saw the relay's certificate; the relay passes everything else on."""
    client, server = pair(identities, seen=identities[2])
    with pytest.raises(NotPaired, match="did not prove its own key"):
        run(client, server, CODE)


def test_a_relay_that_swaps_the_certificate_pairs_no_device(identities: list[Identity]) -> None:
    """S8: a relay that swaps the certificate pairs nobody."""

    def swap(number: int, message: bytes) -> bytes:
        if number != 1:
            return message
        fields = cbor.loads(message, 4096)
        return cbor.dumps({**fields, "certificate": identities[2].certificate_der})

    with pytest.raises(NotPaired):
        run(*pair(identities), CODE, tamper=swap)


def test_an_old_transcript_cannot_be_replayed(identities: list[Identity]) -> None:
    """S10: an old transcript cannot be replayed."""
    recorded: dict[int, bytes] = {}

    def record(number: int, message: bytes) -> bytes:
        recorded[number] = message
        return message

    run(*pair(identities), CODE, tamper=record)
    server = PairingServer(identities[1], "bert")
    server.hello(recorded[1], CODE)
    with pytest.raises((NotPaired, WrongCode)):
        server.confirm(recorded[3])


def test_a_clients_own_message_is_not_an_answer(identities: list[Identity]) -> None:
    """S9: reflected."""
    client, _ = pair(identities)
    hello = client.hello()
    with pytest.raises(ProtocolError):
        client.confirm(hello)


def test_a_clients_own_confirmation_does_not_confirm_it(identities: list[Identity]) -> None:
    client, server = pair(identities)
    confirm = client.confirm(server.hello(client.hello(), CODE))
    with pytest.raises(WrongCode):
        client.done(confirm)


def test_another_version_is_named_on_both_sides(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = pair(identities)
    monkeypatch.setattr(pairing, "PROTOCOL_VERSION", 999)
    hello = client.hello()
    monkeypatch.undo()
    both = rf"version {PROTOCOL_VERSION} .* 999 "
    with pytest.raises(VersionMismatch, match=both) as seen_by_server:
        server.hello(hello, CODE)
    with pytest.raises(VersionMismatch, match=f"version {PROTOCOL_VERSION}"):
        client.confirm(refusal(seen_by_server.value))


def test_refusals_reach_the_client_with_the_tries_left(identities: list[Identity]) -> None:
    client, _ = pair(identities)
    with pytest.raises(WrongCode) as wrong:
        client.done(refusal(WrongCode("a device tried a wrong code"), 3))
    assert wrong.value.tries_left == 3
    with pytest.raises(PairingWindowClosed, match="p2ptrain invite"):
        client.confirm(refusal(PairingWindowClosed("closed")))
    with pytest.raises(PairingError):
        client.confirm(refusal(ProtocolError("no")))


@settings(max_examples=examples_of(10), deadline=None)
@given(data=st.data())
def test_any_changed_byte_pairs_no_device(identities: list[Identity], data: st.DataObject) -> None:
    where = data.draw(st.integers(1, 4))

    def flip(number: int, message: bytes) -> bytes:
        if number != where:
            return message
        at = data.draw(st.integers(0, 5000)) % len(message)  # signatures differ in length
        changed = bytearray(message)
        changed[at] ^= data.draw(st.integers(1, 255))
        return bytes(changed)

    with pytest.raises(Error):
        run(*pair(identities), CODE, tamper=flip)


@pytest.mark.parametrize("where", [1, 2, 3, 4, 5, 6])
def test_a_message_that_does_not_say_its_kind_pairs_no_device(
    identities: list[Identity], where: int
) -> None:
    def without(number: int, message: bytes) -> bytes:
        return message.replace(b"dkind", b"dkjnd") if number == where else message

    with pytest.raises(ProtocolError, match="kind"):
        run(*pair(identities), CODE, tamper=without)


@settings(max_examples=examples_of(20), deadline=None)
@given(message=st.binary(max_size=200))
def test_garbage_is_refused_at_every_step(identities: list[Identity], message: bytes) -> None:
    """S9: garbage is refused at every step."""
    client, server = pair(identities)
    for step in (client.confirm, lambda m: server.hello(m, CODE), server.confirm):
        with pytest.raises(Error):
            step(message)


@pytest.mark.parametrize(
    "point",
    [
        b"",
        b"B",
        b"B" + bytes(32),
        b"B" + b"\x01" + bytes(31),
        b"B" + b"\xff" * 32,
        b"S" + bytes(32),
        b"B" + bytes(64),
    ],
)
def test_bad_points_are_one_kind_of_error(point: bytes) -> None:
    """S9: empty, short, zero, not on the curve, of the wrong side."""
    run = Spake2(PakeSide.CLIENT, CODE, b"a", b"b")
    run.start()
    with pytest.raises(ProtocolError):
        run.finish(point)


def test_a_reflected_point_is_refused() -> None:
    """S9: a reflected point is refused."""
    run = Spake2(PakeSide.CLIENT, CODE, b"a", b"b")
    with pytest.raises(ProtocolError):
        run.finish(run.start())
