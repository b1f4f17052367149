"""The messages of membership and election, as dataclasses and as dictionaries for CBOR.

    ping   seq            answered by ack: "are you there?"
    ack    seq            answer of the probed device, or of a helper that reached it
    req    seq, target    to a helper: "probe target for me"
    nack   seq, lost      the helper's "not reached"; lost: its own link to target has ended
    sync   digest, answer "compare our tables"; tables follow in gossip messages where they differ
    gossip                claims only

These carry claims: what their sender knows, or wants known, of members.

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
from typing import Annotated, TypeVar

import cbor2

from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import MemberRecord, Payload
from p2ptrain.mesh.membership.suspicion import Suspicion
from p2ptrain.net.forms import Count, DeviceId, Flat, Key, Length, Range, Rare, Text, write_form
from p2ptrain.net.read_form import read_form

CLAIMS_LIMIT = 64

TERM_LIMIT = 1 << 53

SUPPORT_LIMIT = 1 << 20

T = TypeVar("T")

ENVELOPE_BYTES = 160
"""Room for every field of a message other than its claims."""


class MembershipKind(StrEnum):
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

    record: Annotated[MemberRecord, Flat()]
    accusers: Annotated[
        tuple[DeviceId, ...], Length(Suspicion.ACCUSERS_LIMIT), Key("by"), Rare()
    ] = ()

    def __post_init__(self) -> None:
        if self.record.certain and self.record.state is not MemberState.DEAD:
            raise ValueError("the end of what has not ended is certain")


@dataclass(frozen=True, slots=True)
class MembershipMessage:
    """One message; fields that a kind does not use are not sent, and are ignored.

    Attributes:
        sequence: matches answers with questions (ping, ack, req, nack).
        target: whom the helper shall probe (req).
        lost: the helper's own link to the target has ended (nack).
        digest: of the sender's table (sync).
        answer: the receiver shall send its digest back (sync).
    """

    kind: MembershipKind
    claims: Annotated[tuple[Claim, ...], Length(CLAIMS_LIMIT)] = ()
    sequence: Count = 0
    target: DeviceId = ""
    lost: bool = False
    digest: Annotated[int, Range(0, (1 << 64) - 1)] = 0
    answer: bool = False


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


_FIELDS: dict[MembershipKind | ElectionKind, tuple[str, ...]] = {
    MembershipKind.PING: ("claims", "sequence"),
    MembershipKind.ACK: ("claims", "sequence"),
    MembershipKind.REQUEST: ("claims", "sequence", "target"),
    MembershipKind.NACK: ("claims", "sequence", "lost"),
    MembershipKind.SYNC: ("claims", "digest", "answer"),
    MembershipKind.GOSSIP: ("claims",),
    ElectionKind.POLL: ("term",),
    ElectionKind.VOTE: ("term",),
    ElectionKind.REPLY: ("term", "yes", "poll", "seen"),
    ElectionKind.ANNOUNCE: ("term", "support"),
    ElectionKind.FOLLOW: ("term",),
    ElectionKind.STALE: ("term", "leader"),
    ElectionKind.ASK: (),
}


def encode(message: MembershipMessage | ElectionMessage) -> Payload:
    """The message as a dictionary that `decode` takes."""
    said = write_form(message)
    return {name: said[name] for name in ("kind", *_FIELDS[message.kind])}


def decode(form: type[T], payload: object) -> T:
    """The message of that form in `payload`.

    Raises:
        ProtocolError: anything at all is wrong with it.
    """
    return read_form(form, payload, "a message of the mesh")


def claim_bytes(claim: Claim) -> int:
    """What the claim adds to a payload in CBOR."""
    return len(cbor2.dumps(write_form(claim)))


def check_record(record: MemberRecord) -> None:
    """Refuse a record that others would refuse.

    Raises:
        ProtocolError: a field is out of bounds.
    """
    read_form(Claim, write_form(Claim(record)), "a device's record")
