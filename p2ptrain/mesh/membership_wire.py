"""The membership protocol's messages, as dataclasses and as dictionaries that survive CBOR.

    ping   seq            answered by ack: "are you there?"
    ack    seq            answer of the probed device, or of a helper that reached it
    req    seq, target    to a helper: "probe target for me"
    nack   seq, lost      the helper's "not reached"; lost: its own link to target has ended
    sync   digest, answer "compare our tables"; tables follow in gossip messages where they differ
    gossip                claims only

Every message carries claims: what its sender knows, or wants known, of members. Input from peers
is checked field by field before anything is made of it; limits come before loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import cbor2

from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.events import MemberRecord, Payload
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.suspicion import Suspicion
from p2ptrain.mesh.text import peer_name, printable

INCARNATION_LIMIT = 1 << 48
SEQUENCE_LIMIT = 1 << 53
CLAIMS_LIMIT = 64
INFO_LIMIT_BYTES = 1024
_INFO_KEYS_LIMIT = 32
_TEXT_LIMIT = 64
_INFO_TEXT_LIMIT = 256
_INT64 = 1 << 63
ENVELOPE_BYTES = 160
"""Room for every field of a message other than its claims."""


class Kind(StrEnum):
    """What a message asks or answers."""

    PING = "ping"
    ACK = "ack"
    REQUEST = "req"
    NACK = "nack"
    SYNC = "sync"
    GOSSIP = "gossip"


@dataclass(frozen=True, slots=True)
class Claim:
    """`record` as the claimant sees it; `accusers` found it silent themselves (if suspect)."""

    record: MemberRecord
    accusers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MembershipMessage:
    """One message; fields that a kind does not use keep their defaults.

    Attributes:
        sequence: matches answers with questions (ping, ack, req, nack).
        target: whom the helper shall probe (req).
        lost: the helper's own link to the target has ended (nack).
        digest: of the sender's table (sync).
        answer: the receiver shall send its digest back (sync).
    """

    kind: Kind
    claims: tuple[Claim, ...] = ()
    sequence: int = 0
    target: str = ""
    lost: bool = False
    digest: int = 0
    answer: bool = False


_FIELDS: dict[Kind, tuple[str, ...]] = {
    Kind.PING: ("sequence",),
    Kind.ACK: ("sequence",),
    Kind.REQUEST: ("sequence", "target"),
    Kind.NACK: ("sequence", "lost"),
    Kind.SYNC: ("digest", "answer"),
    Kind.GOSSIP: (),
}
_KINDS: dict[str, Kind] = {kind.value: kind for kind in Kind}
_ALLOWED = {kind: frozenset({"kind", "claims", *names}) for kind, names in _FIELDS.items()}
_CLAIM_FIELDS = frozenset({"id", "name", "inc", "state", "info", "run", "by", "sure"})


def encode(message: MembershipMessage) -> Payload:
    """The message as a dictionary that `decode` takes."""
    payload: Payload = {"kind": message.kind.value, "claims": encode_claims(message.claims)}
    for name in _FIELDS[message.kind]:
        payload[name] = getattr(message, name)
    return payload


def encode_claims(claims: tuple[Claim, ...]) -> list[Payload]:
    """Claims as they stand in a payload."""
    return [_encode_claim(claim) for claim in claims]


def claim_bytes(claim: Claim) -> int:
    """What the claim adds to a payload in CBOR."""
    return len(cbor2.dumps(_encode_claim(claim)))


def _encode_claim(claim: Claim) -> Payload:
    record = claim.record
    payload: Payload = {
        "id": record.id,
        "name": record.name,
        "inc": record.incarnation,
        "state": record.state.value,
        "info": dict(record.info),
        "run": record.instance,
    }
    if record.certain:
        payload["sure"] = True
    if claim.accusers:
        payload["by"] = list(claim.accusers)
    return payload


def decode(payload: object) -> MembershipMessage:
    """The message in `payload`.

    Raises:
        ProtocolError: anything at all is wrong with it.
    """
    body = _mapping(payload)
    kind = _KINDS.get(_text(body, "kind"))
    if kind is None:
        raise ProtocolError("membership message of an unknown kind")
    _only(body, _ALLOWED[kind])
    values: dict[str, Any] = {name: _READERS[name](body, name) for name in _FIELDS[kind]}
    return MembershipMessage(kind, _claims(body), **values)


def check_record(record: MemberRecord) -> None:
    """Refuse a record that others would refuse.

    Raises:
        ProtocolError: a field is out of bounds.
    """
    _decode_claim(_encode_claim(Claim(record)))


def _claims(body: dict[Any, Any]) -> tuple[Claim, ...]:
    items = body.get("claims")
    if not isinstance(items, list) or len(items) > CLAIMS_LIMIT:
        raise ProtocolError("membership message without a list of claims of bearable length")
    return tuple(_decode_claim(_mapping(item)) for item in items)


def _decode_claim(body: dict[Any, Any]) -> Claim:
    _only(body, _CLAIM_FIELDS)
    try:
        state = MemberState(_text(body, "state"))
    except ValueError:
        raise ProtocolError("membership claim with an unknown state") from None
    record = MemberRecord(
        id=_identity(body, "id"),
        name=_name(body),
        incarnation=_integer(body, "inc", INCARNATION_LIMIT),
        state=state,
        info=_info(body.get("info")),
        instance=_text(body, "run"),
        certain="sure" in body and _flag(body, "sure"),
    )
    if record.certain and state is not MemberState.DEAD:
        raise ProtocolError("membership claim of a certain end of what has not ended")
    return Claim(record, _accusers(body.get("by", [])))


def _accusers(items: object) -> tuple[str, ...]:
    if not isinstance(items, list) or len(items) > Suspicion.ACCUSERS_LIMIT:
        raise ProtocolError("membership claim with too many accusers")
    return tuple(_identity({"by": item}, "by") for item in items)


def _info(value: object) -> dict[str, int | float | str]:
    info = _mapping(value)
    if len(info) > _INFO_KEYS_LIMIT:
        raise ProtocolError("member info with too many keys")
    for key, item in info.items():
        if not _is_key(key) or not _is_plain(item):
            raise ProtocolError("member info with a key or value that is not allowed")
    if len(cbor2.dumps(info)) > INFO_LIMIT_BYTES:
        raise ProtocolError(f"member info of more than {INFO_LIMIT_BYTES} bytes")
    return info


def _is_key(key: object) -> bool:
    return isinstance(key, str) and printable(key, _TEXT_LIMIT) == key


def _is_plain(value: object) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return -_INT64 <= value < _INT64
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) and printable(value, _INFO_TEXT_LIMIT) == value


def _mapping(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ProtocolError("membership message with something else where a map must be")
    return value


def _only(body: dict[Any, Any], allowed: frozenset[str]) -> None:
    if not body.keys() <= allowed:
        raise ProtocolError("membership message with a field that does not belong there")


def _text(body: dict[Any, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or len(value) > _TEXT_LIMIT:
        raise ProtocolError(f"membership message whose {key!r} is not a short text")
    return value


def _printable(body: dict[Any, Any], key: str) -> str:
    value = _text(body, key)
    if not value or not value.isprintable():
        raise ProtocolError(f"membership message whose {key!r} is empty or unprintable")
    return value


def _name(body: dict[Any, Any]) -> str:
    value = _text(body, "name")
    if not value or printable(value, _TEXT_LIMIT) != value:
        raise ProtocolError("membership message whose 'name' is empty or unprintable")
    return peer_name(value)


def _identity(body: dict[Any, Any], key: str) -> str:
    value = _printable(body, key)
    if not value.isascii():
        raise ProtocolError(f"membership message whose {key!r} is not a device id")
    return value


def _integer(body: dict[Any, Any], key: str, limit: int) -> int:
    value = body.get(key)
    if type(value) is not int or not 0 <= value <= limit:
        raise ProtocolError(f"membership message whose {key!r} is not a sane whole number")
    return value


def _flag(body: dict[Any, Any], key: str) -> bool:
    value = body.get(key)
    if not isinstance(value, bool):
        raise ProtocolError(f"membership message whose {key!r} is not true or false")
    return value


_READERS: dict[str, Any] = {
    "sequence": lambda body, key: _integer(body, key, SEQUENCE_LIMIT),
    "target": _identity,
    "lost": _flag,
    "digest": lambda body, key: _integer(body, key, (1 << 64) - 1),
    "answer": _flag,
}
