"""The first message on every link, both ways: a device is connected once its hello is answered.

TLS has already proved which device it is. The hello says which protocol it speaks, which process
of that device this is, and how people call it. Refusals travel as "mesh.refused" with a reason, so
that the person at the refused device reads why.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.addresses import Address, is_usable
from p2ptrain.mesh.text import peer_name, printable
from p2ptrain.net import cbor
from p2ptrain.net.message import Fields, Message

HELLO_KIND = "mesh.hello"
REFUSED_KIND = "mesh.refused"
INFO_LIMIT_BYTES = 1024
ADDRESSES_LIMIT = 8

Info = Mapping[str, int | float | str]


class Refusal(StrEnum):
    """Why a link is not taken."""

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
        name: for people.
        instance: random per process; 16 hex digits.
        uptime_seconds: since the process started.
        port: where it listens.
        addresses: IPs it listens on, as far as it knows.
        token: random per dial; names the link in later hellos.
        last_token: of the last link to the same device that this process knew, or "".
        info: see `Member.info`.
        version, software: protocol number and release.
    """

    name: str
    instance: str
    uptime_seconds: float
    port: int
    addresses: tuple[str, ...] = ()
    token: str = ""
    last_token: str = ""
    info: Info = field(default_factory=dict)
    version: int = PROTOCOL_VERSION
    software: str = __version__


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
    fields: dict[str, Any] = {
        "version": hello.version,
        "software": hello.software,
        "name": hello.name,
        "instance": hello.instance,
        "uptime_seconds": hello.uptime_seconds,
        "port": hello.port,
        "addresses": list(hello.addresses),
        "token": hello.token,
        "last_token": hello.last_token,
        "info": dict(hello.info),
    }
    return Message(HELLO_KIND, fields)


def from_message(message: Message) -> Hello:
    """Check a peer's hello.

    Another version's hello is only read as far as its number: the rest may mean anything.

    Raises:
        ProtocolError: it is malformed.
    """
    fields = message.fields
    version = _whole(fields, "version", 1, 2**31)
    software = printable(_text(fields, "software", 64), 32)
    if version != PROTOCOL_VERSION:
        return Hello("unknown", "", 0.0, 0, version=version, software=software)
    port = _whole(fields, "port", 1, 65535)
    return Hello(
        name=peer_name(_text(fields, "name", 256)),
        instance=_text(fields, "instance", 16),
        uptime_seconds=_uptime(fields.get("uptime_seconds")),
        port=port,
        addresses=_addresses(fields.get("addresses"), port),
        token=_text(fields, "token", 16),
        last_token=_text(fields, "last_token", 16),
        info=checked_info(fields.get("info")),
        version=version,
        software=software,
    )


def refused(reason: Refusal, older: Hello | None = None) -> Message:
    """What the dialled device answers instead; `older`: of the process that has its identity."""
    elsewhere = [[host, older.port] for host in older.addresses] if older is not None else []
    fields = {"reason": reason.value, "version": PROTOCOL_VERSION, "software": __version__}
    return Message(REFUSED_KIND, {**fields, "elsewhere": elsewhere})


def refusal_of(message: Message) -> tuple[Refusal, int, str]:
    """A refusal's reason, protocol version and release.

    Raises:
        ProtocolError: it is malformed.
    """
    fields = message.fields
    try:
        reason = Refusal(_text(fields, "reason", 32))
    except ValueError as error:
        raise ProtocolError("a refusal gives an unknown reason") from error
    software = printable(_text(fields, "software", 64), 32)
    return reason, _whole(fields, "version", 1, 2**31), software


def elsewhere_of(message: Message) -> list[Address]:
    """Where the older process listens, as a refusal says; what cannot be dialled is left out."""
    entries = message.fields.get("elsewhere")
    found: list[Address] = []
    for entry in entries[:ADDRESSES_LIMIT] if isinstance(entries, list) else []:
        match entry:
            case [str(host), int(port)] if is_usable((host, port)):
                found.append((host, port))
    return found


def checked_info(value: object) -> Info:
    """A device's description of itself.

    Raises:
        ProtocolError: it is too long, or holds other than numbers and texts.
    """
    if not isinstance(value, Mapping) or len(cbor.dumps(value)) > INFO_LIMIT_BYTES:
        raise ProtocolError("a device's info is malformed or too long")
    for item in value.values():
        if type(item) not in (int, float, str):
            raise ProtocolError("a device's info holds other than numbers and texts")
    return {
        printable(key, 64): printable(item, 256) if isinstance(item, str) else item
        for key, item in value.items()
    }


def _text(fields: Fields, key: str, limit: int) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or len(value) > limit:
        raise ProtocolError(f"a hello's {key} is malformed")
    return value


def _whole(fields: Fields, key: str, least: int, most: int) -> int:
    value = fields.get(key)
    if type(value) is not int or not least <= value <= most:
        raise ProtocolError(f"a hello's {key} is malformed")
    return value


def _uptime(value: object) -> float:
    if not isinstance(value, float) or not 0 <= value < 1e10:  # NaN fails both comparisons
        raise ProtocolError("a hello's uptime is malformed")
    return value


def _addresses(value: object, port: int) -> tuple[str, ...]:
    """Those that can be dialled: a name would be looked up, and some texts cannot be."""
    if not isinstance(value, list) or len(value) > ADDRESSES_LIMIT:
        raise ProtocolError("a hello's addresses are malformed")
    if not all(isinstance(item, str) and len(item) <= 64 for item in value):
        raise ProtocolError("a hello's addresses are malformed")
    return tuple(item for item in value if is_usable((item, port)))


def mismatch(version: int, software: str) -> str:
    """What people read where another device speaks another protocol version."""
    return (
        f"this device speaks protocol version {PROTOCOL_VERSION} (p2ptrain {__version__}), the "
        f"other one {version} (p2ptrain {printable(software, 32)}): install the same p2ptrain on "
        "both"
    )
