"""The first message on every link, both ways: a device is connected once its hello is answered.

TLS has already proved which device it is. The hello says which protocol it speaks, which process
of that device this is, and its display name. A refusal is sent as "mesh.refused" with a reason, so
that the user of the refused device can read why.

Both sides dial, because either may sit behind a firewall; usually one dial is first. Where both
cross, the one of the smaller id wins. A device that restarts shows a new instance while its old
link may not have ended yet: only a question over the old link separates a restart from a copied
identity.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import Annotated, TypeAlias

from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.mesh.discovery.addresses import is_usable
from p2ptrain.mesh.membership.core_events import Info
from p2ptrain.net.fields import PeerName, Software, Spoken, Version
from p2ptrain.net.forms import Length, Range, Text, write_form
from p2ptrain.net.link.stream import Address
from p2ptrain.net.message import Message
from p2ptrain.net.read_form import read_form

HELLO_KIND = "mesh.hello"

REFUSED_KIND = "mesh.refused"

ADDRESSES_LIMIT = 8

Port: TypeAlias = Annotated[int, Range(1, 65535)]

_Token: TypeAlias = Annotated[str, Text(16)]


class LinkRefusal(StrEnum):
    """For which reason a link is not taken."""

    VERSION = "version"
    """The two speak different protocol versions."""
    CROSSED = "crossed"
    """Both dialled at once; the other link is kept."""
    COPIED = "copied"
    """An older process runs with the same identity."""
    OWN = "own"
    """A device has dialled itself."""
    LEAVING = "leaving"
    """The device is about to stop."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a device says of itself on a new link.

    Attributes:
        name: shown to users.
        instance: random per process; 16 hex digits.
        uptime_seconds: since the process started.
        port: where it listens.
        addresses: IPs it listens on, as far as it knows.
        token: random per dial; names the link in later hellos.
        last_token: of the last link to the same device that this process knew, or "".
        info: see `Member.info`.
        version, software: protocol number and release.
    """

    version: Version = field(default=PROTOCOL_VERSION, kw_only=True)
    software: Software = field(default=__version__, kw_only=True)
    name: PeerName
    instance: _Token
    uptime_seconds: Annotated[float, Range(0.0, 1e10)]
    port: Port
    addresses: Annotated[tuple[Annotated[str, Text(64)], ...], Length(ADDRESSES_LIMIT)] = ()
    token: _Token = ""
    last_token: _Token = ""
    info: Info = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a link is not taken.

    Attributes:
        elsewhere: where the older process of the identity listens (copied).
    """

    reason: LinkRefusal
    version: Version = PROTOCOL_VERSION
    software: Software = __version__
    elsewhere: Annotated[tuple[Address, ...], Length(ADDRESSES_LIMIT)] = ()


def new_token() -> str:
    """64 random bits as hex."""
    return secrets.token_hex(8)


def is_younger(one: Hello, one_id: str, other: Hello, other_id: str) -> bool:
    """Whether `one` gives way to `other`; both sides of a link come to the same answer."""
    # The later one started, the smaller its uptime; ids differ except for copies, instances then.
    mine = (-one.uptime_seconds, one_id, one.instance)
    return mine > (-other.uptime_seconds, other_id, other.instance)


def to_message(hello: Hello) -> Message:
    """The hello as it travels."""
    return Message(HELLO_KIND, write_form(hello))


def from_message(message: Message) -> Hello:
    """Check a peer's hello; of its addresses those are left that can be dialled.

    Raises:
        ProtocolError: it is malformed.
    """
    spoken = read_form(Spoken, message.fields, "a hello", extra=True)
    if spoken.version != PROTOCOL_VERSION:
        return Hello("unknown", "", 0.0, 0, version=spoken.version, software=spoken.software)
    hello = read_form(Hello, message.fields, "a hello", extra=True)
    # A name would be looked up, and some texts cannot be.
    usable = tuple(host for host in hello.addresses if is_usable((host, hello.port)))
    return replace(hello, addresses=usable)


def refused(reason: LinkRefusal, older: Hello | None = None) -> Message:
    """What the dialled device answers instead; `older`: of the process that has its identity."""
    elsewhere = () if older is None else tuple((host, older.port) for host in older.addresses)
    return Message(REFUSED_KIND, write_form(Refused(reason, elsewhere=elsewhere)))


def refusal_of(message: Message) -> Refused:
    """A refusal; what cannot be dialled is left out.

    Raises:
        ProtocolError: it is malformed.
    """
    said = read_form(Refused, message.fields, "a refusal", extra=True)
    return replace(said, elsewhere=tuple(filter(is_usable, said.elsewhere)))


class LinkAction(Enum):
    """What to do with an incoming link."""

    ACCEPT = auto()
    """Take it; an older link to the same device is dropped."""
    REFUSE = auto()
    """Answer with the refusal."""
    ASK_OLD = auto()
    """Another instance: accept it if the old link does not answer, else `between_instances`."""
    STOP_SELF = auto()
    """An older process with our own identity is running."""


@dataclass(frozen=True, slots=True)
class LinkDecision:
    """An action and why."""

    action: LinkAction
    reason: str
    refusal: LinkRefusal | None = None


@dataclass(frozen=True, slots=True)
class LinkSituation:
    """What this device knows when a hello comes in.

    Attributes:
        own_id, own: this device.
        current: hello of the link to the same device that is up, or None.
        dialling: our own hello to it is on its way, not answered yet.
    """

    own_id: str
    own: Hello
    current: Hello | None
    dialling: bool


def judge_incoming(peer_id: str, theirs: Hello, here: LinkSituation) -> LinkDecision:
    """What to do with a link on which `theirs` is the first message."""
    if theirs.version != PROTOCOL_VERSION:
        return _refuse(LinkRefusal.VERSION, f"it speaks protocol version {theirs.version}")
    if peer_id == here.own_id:
        return _judge_own(theirs, here)
    current = here.current
    if current is None:
        if here.dialling and here.own_id < peer_id:
            return _refuse(LinkRefusal.CROSSED, "our own dial to it wins")
        return LinkDecision(LinkAction.ACCEPT, "first link")
    if current.instance != theirs.instance:
        return LinkDecision(LinkAction.ASK_OLD, "another process than the one connected")
    if theirs.last_token == current.token:
        return LinkDecision(LinkAction.ACCEPT, "the device lost the link we have")
    return _refuse(LinkRefusal.CROSSED, "a link is up already")


def between_instances(peer_id: str, old: Hello, new: Hello) -> LinkDecision:
    """Two processes with one identity, both alive: the younger one must stop."""
    if is_younger(new, peer_id, old, peer_id):
        return _refuse(LinkRefusal.COPIED, "an older process with its identity is connected")
    return LinkDecision(LinkAction.ACCEPT, "it is older than the process connected so far")


def _judge_own(theirs: Hello, here: LinkSituation) -> LinkDecision:
    if theirs.instance == here.own.instance:
        return _refuse(LinkRefusal.OWN, "this device dialled itself")
    if is_younger(theirs, here.own_id, here.own, here.own_id):
        return _refuse(LinkRefusal.COPIED, "a younger process with our identity")
    return LinkDecision(LinkAction.STOP_SELF, "an older process with our identity")


def _refuse(refusal: LinkRefusal, reason: str) -> LinkDecision:
    return LinkDecision(LinkAction.REFUSE, reason, refusal)
