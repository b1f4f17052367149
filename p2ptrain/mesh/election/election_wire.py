"""The election's messages, as dataclasses and as dictionaries for CBOR.

poll     term          "would you vote for me in that term?" binds no device (Raft's pre-vote)
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
from typing import Annotated

from p2ptrain.mesh.membership.core_events import Payload
from p2ptrain.net.forms import Range, Text, write_form
from p2ptrain.net.read_form import read_form

TERM_LIMIT = 1 << 53

SUPPORT_LIMIT = 1 << 20


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
    """One message; fields that a kind does not use are not sent, and are ignored.

    Attributes:
        term: what the message is about.
        yes: would vote, or has voted (reply).
        poll: the reply is to a poll, not to a vote.
        seen: highest term its sender knows of (reply).
        support: devices that follow the coordinator, itself included (announce).
        leader: whom the sender follows, or "" (stale).
    """

    kind: ElectionKind
    term: Annotated[int, Range(0, TERM_LIMIT)] = 0
    yes: bool = False
    poll: bool = False
    seen: Annotated[int, Range(0, TERM_LIMIT)] = 0
    support: Annotated[int, Range(0, SUPPORT_LIMIT)] = 0
    leader: Annotated[str, Text(64)] = ""

    def __post_init__(self) -> None:
        if not self.leader.isascii():
            raise ValueError("its leader is not a device id")


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
    said = write_form(message)
    return {name: said[name] for name in ("kind", *_FIELDS[message.kind])}


def decode(payload: object) -> ElectionMessage:
    """The message in `payload`.

    Raises:
        ProtocolError: anything at all is wrong with it.
    """
    return read_form(ElectionMessage, payload, "an election message")
