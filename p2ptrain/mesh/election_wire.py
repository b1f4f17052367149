"""The election's messages, as dataclasses and as dictionaries that survive CBOR.

poll     term          "would you vote for me in that term?" binds nobody (Raft's pre-vote)
vote     term          "vote for me"
reply    term, yes     answer to either, with the term asked for; `seen`: highest term known
announce term, support "I coordinate in that term"
follow   term          answer to announce: "I follow you"
stale    term, leader  answer to an announce of an older term, or to an ask where the asked
                       one does not coordinate; leader: whom its sender follows, or ""
ask                    "do you coordinate?" answered by announce or stale
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.events import Payload

TERM_LIMIT = 1 << 53
SUPPORT_LIMIT = 1 << 20
_ID_LIMIT = 64


class ElectionKind(StrEnum):
    """What a message asks or says."""

    POLL = "poll"
    VOTE = "vote"
    REPLY = "reply"
    ANNOUNCE = "announce"
    FOLLOW = "follow"
    STALE = "stale"
    ASK = "ask"


@dataclass(frozen=True, slots=True)
class ElectionMessage:
    """One message; fields that a kind does not use keep their defaults.

    Attributes:
        term: what the message is about.
        yes: would vote, or has voted (reply).
        poll: the reply is to a poll, not to a vote.
        seen: highest term its sender knows of (reply).
        support: devices that follow the coordinator, itself included (announce).
        leader: whom the sender follows, or "" (stale).
    """

    kind: ElectionKind
    term: int = 0
    yes: bool = False
    poll: bool = False
    seen: int = 0
    support: int = 0
    leader: str = ""


_FIELDS: dict[ElectionKind, tuple[str, ...]] = {
    ElectionKind.POLL: ("term",),
    ElectionKind.VOTE: ("term",),
    ElectionKind.REPLY: ("term", "yes", "poll", "seen"),
    ElectionKind.ANNOUNCE: ("term", "support"),
    ElectionKind.FOLLOW: ("term",),
    ElectionKind.STALE: ("term", "leader"),
    ElectionKind.ASK: (),
}


def encode(message: ElectionMessage) -> Payload:
    """The message as a dictionary that `decode` takes."""
    payload: Payload = {"kind": message.kind.value}
    for name in _FIELDS[message.kind]:
        payload[name] = getattr(message, name)
    return payload


def decode(payload: object) -> ElectionMessage:
    """The message in `payload`.

    Raises:
        ProtocolError: anything at all is wrong with it.
    """
    if not isinstance(payload, dict) or not isinstance(payload.get("kind"), str):
        raise ProtocolError("election message without a kind")
    try:
        kind = ElectionKind(payload["kind"])
    except ValueError:
        raise ProtocolError("election message of an unknown kind") from None
    names = _FIELDS[kind]
    if payload.keys() != {"kind", *names}:
        raise ProtocolError(f"election message {kind.value!r} with fields missing or added")
    values = {name: _READERS[name](payload[name]) for name in names}
    return ElectionMessage(kind, **values)


def _whole(value: object, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ProtocolError("election message with a number out of bounds")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError("election message whose flag is not true or false")
    return value


def _leader(value: object) -> str:
    if not isinstance(value, str) or len(value) > _ID_LIMIT or not value.isascii():
        raise ProtocolError("election message whose leader is not a device id")
    return value


_READERS: dict[str, Any] = {
    "term": lambda value: _whole(value, TERM_LIMIT),
    "seen": lambda value: _whole(value, TERM_LIMIT),
    "support": lambda value: _whole(value, SUPPORT_LIMIT),
    "yes": _flag,
    "poll": _flag,
    "leader": _leader,
}
