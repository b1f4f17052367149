"""The membership protocol's messages, as dataclasses and as dictionaries for CBOR.

    ping   seq            answered by ack: "are you there?"
    ack    seq            answer of the probed device, or of a helper that reached it
    req    seq, target    to a helper: "probe target for me"
    nack   seq, lost      the helper's "not reached"; lost: its own link to target has ended
    sync   digest, answer "compare our tables"; tables follow in gossip messages where they differ
    gossip                claims only

Every message carries claims: what its sender knows, or wants known, of members.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import cbor2

from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import MemberRecord, Payload
from p2ptrain.mesh.membership.suspicion import Suspicion
from p2ptrain.net.forms import Count, DeviceId, Flat, Key, Length, Range, Rare, write_form
from p2ptrain.net.read_form import read_form

CLAIMS_LIMIT = 64

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


_FIELDS: dict[MembershipKind, tuple[str, ...]] = {
    MembershipKind.PING: ("sequence",),
    MembershipKind.ACK: ("sequence",),
    MembershipKind.REQUEST: ("sequence", "target"),
    MembershipKind.NACK: ("sequence", "lost"),
    MembershipKind.SYNC: ("digest", "answer"),
    MembershipKind.GOSSIP: (),
}


def encode(message: MembershipMessage) -> Payload:
    """The message as a dictionary that `decode` takes."""
    said = write_form(message)
    return {name: said[name] for name in ("kind", "claims", *_FIELDS[message.kind])}


def claim_bytes(claim: Claim) -> int:
    """What the claim adds to a payload in CBOR."""
    return len(cbor2.dumps(write_form(claim)))


def decode(payload: object) -> MembershipMessage:
    """The message in `payload`.

    Raises:
        ProtocolError: anything at all is wrong with it.
    """
    return read_form(MembershipMessage, payload, "a membership message")


def check_record(record: MemberRecord) -> None:
    """Refuse a record that others would refuse.

    Raises:
        ProtocolError: a field is out of bounds.
    """
    read_form(Claim, write_form(Claim(record)), "a device's record")
