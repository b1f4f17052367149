"""What other releases read, byte for byte: these keys, in this order, and nothing more."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.control.lease import LeasedIdentity, place_fields, window_fields
from p2ptrain.control.member_lock import RECORD_NAME, ControlRecord, write_record
from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.discovery.addresses import AddressBook
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.identity.device_record import ADDRESSES_FILE, DEVICE_FILE, DeviceRecord
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.links.hello import Hello, LinkRefusal, refused, to_message
from p2ptrain.mesh.membership.core_events import MemberRecord
from p2ptrain.mesh.membership.core_messages import (
    Claim,
    MembershipKind,
    MembershipMessage,
    claim_bytes,
    encode,
)
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust.pairing import PairingClient, PairingServer, WrongCode, refusal
from p2ptrain.mesh.trust.pairing_window import CODES_FILE, KnownCodes, PairingWindow
from p2ptrain.mesh.trust.trust import TrustedDevice, TrustRecord, encode_record
from p2ptrain.mesh.trust.trust_store import TRUST_FILE, TrustStore
from p2ptrain.mesh.trust_exchange import TrustExchange
from p2ptrain.net import cbor
from p2ptrain.net.message import Message

ID = "ab" * 32
ALIVE = MemberRecord(
    ID, "pi", 3, info={"threads": 4, "os": "Linux", "load": 0.5}, instance="f" * 16
)
ALIVE_BYTES = {
    "id": ID,
    "name": "pi",
    "inc": 3,
    "state": "alive",
    "info": {"threads": 4, "os": "Linux", "load": 0.5},
    "run": "f" * 16,
}
ENDED = MemberRecord("b", "b", 0, MemberState.DEAD, certain=True)
ENDED_BYTES = {
    "id": "b",
    "name": "b",
    "inc": 0,
    "state": "dead",
    "info": {},
    "run": "",
    "sure": True,
}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (MembershipMessage(MembershipKind.GOSSIP), {"kind": "gossip", "claims": []}),
        (
            MembershipMessage(MembershipKind.PING, (Claim(ALIVE),), sequence=0),
            {"kind": "ping", "claims": [ALIVE_BYTES], "sequence": 0},
        ),
        (
            MembershipMessage(MembershipKind.ACK, (Claim(ENDED),), sequence=7),
            {"kind": "ack", "claims": [ENDED_BYTES], "sequence": 7},
        ),
        (
            MembershipMessage(MembershipKind.REQUEST, (Claim(ENDED, ("c", ID)),), 1 << 53, "c"),
            {
                "kind": "req",
                "claims": [{**ENDED_BYTES, "by": ["c", ID]}],
                "sequence": 1 << 53,
                "target": "c",
            },
        ),
        (
            MembershipMessage(MembershipKind.NACK, sequence=1, lost=True),
            {"kind": "nack", "claims": [], "sequence": 1, "lost": True},
        ),
        (
            MembershipMessage(MembershipKind.SYNC, digest=(1 << 64) - 1),
            {"kind": "sync", "claims": [], "digest": (1 << 64) - 1, "answer": False},
        ),
    ],
)
def test_membership(message: MembershipMessage, said: dict[str, Any]) -> None:
    assert cbor.dumps(encode(message)) == cbor.dumps(said)


def test_what_a_claim_takes_is_what_it_is_said_to_take() -> None:
    assert claim_bytes(Claim(ALIVE)) == len(cbor.dumps(ALIVE_BYTES))


HELLO = Hello("pi", "0" * 16, 3.0, 4000, ("192.168.1.2",), "aa", "bb", {"threads": 4})


def test_hello_and_refusal() -> None:
    said: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "software": __version__,
        "name": "pi",
        "instance": "0" * 16,
        "uptime_seconds": 3.0,
        "port": 4000,
        "addresses": ["192.168.1.2"],
        "token": "aa",
        "last_token": "bb",
        "info": {"threads": 4},
    }
    assert (to_message(HELLO).kind, cbor.dumps(to_message(HELLO).fields)) == (
        "mesh.hello",
        cbor.dumps(said),
    )
    said = {"reason": "copied", "version": PROTOCOL_VERSION, "software": __version__}
    for older, elsewhere in ((None, []), (HELLO, [["192.168.1.2", 4000]])):
        message = refused(LinkRefusal.COPIED, older)
        assert cbor.dumps(message.fields) == cbor.dumps({**said, "elsewhere": elsewhere})


def test_trust_record() -> None:
    own_id = hashlib.sha256(b"certificate").hexdigest()
    device = TrustedDevice(own_id, b"certificate", "pi", 3, True, "cd" * 32)
    said = [own_id, b"certificate", "pi", 3, True, "cd" * 32, b"signature"]
    assert encode_record(TrustRecord(device, b"signature")) == cbor.dumps(said)


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create(StateFolder(tmp_path_factory.mktemp("me") / "state"))


def test_pairing(me: Identity) -> None:
    client, server = (
        PairingClient(me, "pi", "12345678", me.certificate_der),
        PairingServer(me, "nas"),
    )
    hello = client.hello()
    answer = server.hello(hello, "12345678")
    confirm = client.confirm(answer)
    confirmed = server.confirm(confirm)
    done = client.done(confirmed)
    _paired, finished = server.done(done)
    secret = [cbor.loads(message, 4096) for message in (hello, answer, confirm, confirmed)]
    version = {"version": PROTOCOL_VERSION}
    expected: list[dict[str, Any]] = [
        {
            **{"kind": "hello", **version, "software": __version__},
            **{"certificate": me.certificate_der, "pake": secret[0]["pake"]},
        },
        {"kind": "hello", **version, "pake": secret[1]["pake"]},
        *({"kind": "confirm", "mac": s["mac"], "signature": s["signature"]} for s in secret[2:]),
        {"kind": "done", "name": "pi"},
        {"kind": "done", "name": "nas"},
    ]
    said = [hello, answer, confirm, confirmed, done, finished]
    assert said == list(map(cbor.dumps, expected))


def test_pairing_refused() -> None:
    about = {"version": PROTOCOL_VERSION, "software": __version__}
    said: dict[str, Any] = {"kind": "refused", "reason": "wrong code", **about, "tries_left": 3}
    assert refusal(WrongCode("no"), 3) == cbor.dumps(said)
    said = {"kind": "refused", "reason": "malformed", **about, "tries_left": None}
    assert refusal(ProtocolError("no")) == cbor.dumps(said)


def test_place() -> None:
    place = LeasedIdentity(
        "laptop", 4000, PairingWindow("12345678", 130.0, wrong_tries=3, invited=True)
    )
    window = {"code": "12345678", "seconds_left": 30.0, "wrong_tries": 3, "invited": True}
    said = {"name": "laptop", "port": 4000, "window": window}
    assert json.dumps(place_fields(place, now=100.0)) == json.dumps(said)
    assert json.dumps(window_fields(None, 0.0)) == json.dumps({"window": None})


def test_files(me: Identity, tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    write_record(folder.path, ControlRecord("/tmp/socket", "ab" * 32, 4711))
    file = DeviceRecord(folder, "anna", "host")
    file.rename("anna-2")
    file.keep_term(7)
    file.save_addresses({ID: [("10.0.0.2", 47300)]})
    codes = KnownCodes(folder, ID)
    codes.take("11111111")
    codes.spend()
    codes.take("22222222")
    TrustStore(folder, me).add_paired(me.certificate_der, "pi")
    marks = [
        hashlib.sha256(f"p2ptrain code {ID} {code}".encode()).hexdigest()
        for code in ("11111111", "22222222")
    ]
    trusted = {
        "id": me.id,
        "name": "pi",
        "certificate": base64.b64encode(me.certificate_der).decode(),
        "counter": 1,
        "revoked": False,
        "introduced_by": me.id,
    }
    said = {
        RECORD_NAME: {"address": "/tmp/socket", "token": "ab" * 32, "pid": 4711},
        DEVICE_FILE: {"name": "anna-2", "asked_name": "anna", "term": 7},
        ADDRESSES_FILE: {ID: [["10.0.0.2", 47300]]},
        CODES_FILE: {"format": "p2ptrain.codes/1", "taken": marks[1:], "spent": marks[:1]},
        TRUST_FILE: {"format": "p2ptrain.trusted/1", "devices": [trusted]},
    }
    for name, value in said.items():
        assert json.dumps(folder.read_json(name)) == json.dumps(value)


def test_trust_exchange(me: Identity, tmp_path: Path) -> None:
    store = TrustStore(StateFolder(tmp_path / "state"), me)
    store.add_paired(me.certificate_der, "pi")
    posted: list[Message] = []
    connections: Any = SimpleNamespace(
        post=lambda _peer, message: posted.append(message),
        connected=lambda: ["other"],
        addresses=lambda _device: AddressBook(proven=[("10.0.0.2", 4000)] * 9),
    )
    notices = WarnOnce(lambda _event: None, store.name)
    guard = Guard(store, notices, lambda _peer: None)
    TrustExchange(store, connections, guard, notices, lambda *_: None).spread(me.id)
    (message,) = posted
    record = message.fields["record"]
    said = {"record": record, "addresses": [["10.0.0.2", 4000]] * 4}
    assert (message.kind, cbor.dumps(message.fields)) == ("trust.record", cbor.dumps(said))
    assert cbor.loads(record, 4096)[:6] == [me.id, me.certificate_der, "pi", 1, False, me.id]
