"""Events and instructions of the mesh's pure cores, membership and election.

A core never sends, waits or reads a clock. The shell feeds it events together with the time, and
carries out the instructions that come back, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.interface import MemberState
from p2ptrain.net import cbor
from p2ptrain.net.fields import PeerName, printable
from p2ptrain.net.forms import By, DeviceId, Key, Range, Rare, Text

INCARNATION_LIMIT = 1 << 48

INFO_LIMIT_BYTES = 1024

_INFO_ITEMS_LIMIT = 32

_INFO_TEXT_LIMIT_CHARACTERS = 256


def _read_info(value: object) -> Mapping[str, int | float | str]:
    """Numbers and texts that can be shown, at most so many."""
    if not isinstance(value, Mapping) or len(value) > _INFO_ITEMS_LIMIT:
        raise ValueError(f"expected an object of at most {_INFO_ITEMS_LIMIT} items")
    if not all(_is_plain(item) for item in (*value.keys(), *value.values())):
        raise ValueError("expected numbers and texts that can be shown, found something else")
    if len(cbor.dumps(value)) > INFO_LIMIT_BYTES:
        raise ValueError(f"expected at most {INFO_LIMIT_BYTES} bytes in all")
    return value


def _is_plain(item: object) -> bool:
    if isinstance(item, str):
        return printable(item, _INFO_TEXT_LIMIT_CHARACTERS) == item
    return type(item) is int or (type(item) is float and math.isfinite(item))


Info: TypeAlias = Annotated[Mapping[str, int | float | str], By(_read_info, dict)]
"""What a device says of itself."""

Payload: TypeAlias = dict[str, Any]
"""A plain dictionary that survives CBOR, at most `MembershipConfig.message_limit_bytes` of it."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One device as a member knows it.

    Attributes:
        name: shown to users.
        incarnation: raised by the device itself, to contradict what others say of it.
        state: as the holder of this record sees the device.
        info: what the device says of itself.
        instance: drawn by every process, so that a restart is never mistaken for the
            process before it. Empty in the record given to `Membership`: it draws one.
        certain: in state "dead" only: that process is known to have ended; else it was silent.
    """

    id: DeviceId
    name: PeerName
    incarnation: Annotated[int, Range(0, INCARNATION_LIMIT), Key("inc")] = 1
    state: MemberState = MemberState.ALIVE
    info: Info = field(default_factory=dict)
    instance: Annotated[str, Text(64), Key("run")] = ""
    certain: Annotated[bool, Key("sure"), Rare()] = False


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """`peer` is who the link's certificate says it is, never what the payload says."""

    peer: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class PeerLinkUp:
    """The first link to `peer` is up: its application hello was answered."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerLinkLost:
    """The last link to `peer` ended.

    Attributes:
        refused: a redial was refused, so its process is gone. May follow
            an earlier `PeerLinkLost(peer, refused=False)` of the same loss.
    """

    peer: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What came over links since the last such event, of whatever kind.

    Attributes:
        came: whose was much: peer -> a time not later than that of the last bytes.
        signs: from whom anything came, in order or not: the same.
    """

    came: Mapping[str, float]
    signs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leave:
    """This device leaves; carry out the instructions, then close."""


@dataclass(frozen=True, slots=True)
class SelfChanged:
    """This device changes its description; None keeps what was."""

    name: str | None = None
    info: Info | None = None


@dataclass(frozen=True, slots=True)
class TrustChanged:
    """The ids of all paired devices; members no longer among them are dead at once.

    None trusts every id (simulations only).
    """

    trusted: frozenset[str] | None


MembershipEvent: TypeAlias = (
    MessageReceived | PeerLinkUp | PeerLinkLost | LinkTraffic | Leave | SelfChanged | TrustChanged
)


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send `payload` to `peer`; drop it where there is no link (and, for a member, make one)."""

    peer: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class MemberUpdated:
    """A member appeared (previous state None) or changed its state, its name or its info."""

    record: MemberRecord
    previous_state: MemberState | None
    reason: str


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """`peer` said what this device does not believe; `about`: of whom, where it concerns one."""

    peer: str
    offence: Offence
    about: str = ""


Instruction: TypeAlias = SendTo | MemberUpdated | Misbehaved


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """For the election: the ids alive or suspect, this device included."""

    alive: frozenset[str]


ElectionEvent: TypeAlias = MembersChanged | MessageReceived


@dataclass(frozen=True, slots=True)
class CoordinatorIs:
    """This device now follows, or is, the coordinator of `term`."""

    id: str
    term: int
    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """No coordinator is known until the next `CoordinatorIs`."""

    reason: str


ElectionInstruction: TypeAlias = SendTo | CoordinatorIs | CoordinatorLost | Misbehaved
