"""Which devices this household trusts: a pure rule for merging what trusted devices claim.

    entry  = (device id, certificate, name, counter, revoked)
    record = entry + its signer + that device's ECDSA signature over the entry

A record is believed only when its signer is trusted itself and not revoked. For one device the
highest counter wins; at equal counters revoked wins. Pairing again after a revocation raises the
counter, so an old introduction can never bring a removed device back. No device may introduce more
than half of the room that the others leave in the book, so that however many lie, the user can
always pair one more; where the book is full all the same, the entry worth least makes room. No
device vouches for itself: a removed device would outbid its removal at a member that has not
received it yet. All members are equals: any of them may introduce or remove any other
(docs/internals/threat_model.md says what that means).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Annotated, NamedTuple, TypeAlias

from p2ptrain.mesh.identity.identity import (
    CERTIFICATE_LIMIT_BYTES,
    Identity,
    can_be_a_device,
    is_signed,
)
from p2ptrain.net import cbor
from p2ptrain.net.fields import peer_name
from p2ptrain.net.forms import By, Length, Range, Row, Text
from p2ptrain.net.read_form import read_form
from p2ptrain.net.transport.tls import certificate_id

DEVICES_LIMIT = 256
"""Most devices remembered, removed ones included: paired peers cannot fill disk or memory."""

COUNTER_JUMP_LIMIT = 1024
"""How far a record's counter may lie above the known one. Without a limit one hostile record with
the greatest counter would make a removal final for ever."""

RECORD_LIMIT_BYTES = 2048

_SIGNED_LABEL = "p2ptrain trust record 1"


def _read_name(value: object) -> str:
    # It is signed, so it cannot be replaced by one that a device may have.
    if not isinstance(value, str) or peer_name(value) != value:
        raise ValueError("expected a name that a device may have")
    return value


Digest: TypeAlias = Annotated[str, Text(64, like="[0-9a-f]{64}")]
"""The id of a device, where it may be no other text."""

Counter: TypeAlias = Annotated[int, Range(1, 2**62)]

Certificate: TypeAlias = Annotated[bytes, Length(CERTIFICATE_LIMIT_BYTES)]


@dataclass(frozen=True, slots=True)
class TrustedDevice:
    """What is remembered of one device.

    Attributes:
        id: SHA-256 of `certificate_der`, hex.
        certificate_der: pinned for every connection.
        name: as last received; shown to users.
        counter: rises with each pairing after a removal, and each removal.
        revoked: removed; kept so that an old introduction cannot bring it back.
        introduced_by: id of the device that vouched for it; our own id where we paired.
    """

    id: Digest
    certificate_der: Certificate
    name: Annotated[str, By(_read_name, str)]
    counter: Counter
    revoked: bool
    introduced_by: Digest

    def __post_init__(self) -> None:
        if certificate_id(self.certificate_der) != self.id:
            raise ValueError("the certificate is not that of its device")


@dataclass(frozen=True, slots=True)
class TrustRecord:
    """A device's signed word about another one; `device.introduced_by` is the signer."""

    device: Annotated[TrustedDevice, Row()]
    signature: Annotated[bytes, Length(128)]


TrustBook = Mapping[str, TrustedDevice]
"""By device id; never this device itself."""


class TrustDecision(NamedTuple):
    """What `judge` decided: the entry to remember, or None, and why; `gone` makes room for it.

    `too_many`: its signer has introduced more devices than one may.
    """

    entry: TrustedDevice | None
    reason: str
    gone: str | None = None
    too_many: bool = False


def sign_record(device: TrustedDevice, signer: Identity) -> TrustRecord:
    """`signer` vouches for what it remembers of `device`."""
    said = replace(device, introduced_by=signer.id)
    return TrustRecord(said, signer.sign(_signed_bytes(said)))


def judge(
    record: TrustRecord, book: TrustBook, self_id: str, limit: int = DEVICES_LIMIT
) -> TrustDecision:
    """Whether `record` changes what this device remembers, of so many devices at most. Pure."""
    device, known = record.device, book.get(record.device.id)
    if device.id == self_id:
        return TrustDecision(None, "it is about this device")
    if device.id == device.introduced_by:
        return TrustDecision(None, "it is about its own signer")
    signer = book.get(device.introduced_by)
    if signer is None or signer.revoked:
        return TrustDecision(None, "its signer is not trusted")
    if not is_signed(signer.certificate_der, _signed_bytes(device), record.signature):
        return TrustDecision(None, "its signature is wrong")
    gone = None
    if known is None:
        introduced, most = introductions(signer.id, book, limit)
        if introduced >= most:
            reason = f"{signer.name} has introduced {introduced} devices already"
            return TrustDecision(None, reason, too_many=True)
        if len(book) >= limit:
            gone = _least_worth(book)
            if gone is None:
                return TrustDecision(None, f"{limit} devices are remembered already")
    if known is not None and not _is_newer(device, known):
        return TrustDecision(None, "nothing new")
    if device.counter > (known.counter if known else 0) + COUNTER_JUMP_LIMIT:
        return TrustDecision(None, "its counter jumps")
    if not can_be_a_device(device.certificate_der):
        # Not a breach that ends the link: its sender may only have passed it on.
        return TrustDecision(None, "its certificate is none")
    return TrustDecision(device, "removed" if device.revoked else "introduced", gone)


def introductions(introducer: str, book: TrustBook, limit: int = DEVICES_LIMIT) -> tuple[int, int]:
    """How many devices of `book` are there by the word of that one alone, and how many may be."""
    introduced = sum(entry.introduced_by == introducer for entry in book.values())
    return introduced, (limit - (len(book) - introduced)) // 2


def _least_worth(book: TrustBook, self_id: str | None = None) -> str | None:
    """Who makes room: a removed device that a removed one introduced; it cannot come back by that.

    For a user who pairs a device (`self_id`: this one) also other removed devices, and then one
    of those that the busiest introducer brought.
    """

    def is_orphan(entry: TrustedDevice) -> bool:
        introducer = book.get(entry.introduced_by)
        return introducer is None or introducer.revoked

    removed = [entry for entry in book.values() if entry.revoked]
    orphans = [e for e in removed if e.introduced_by != self_id and is_orphan(e)]
    if self_id is None:
        return orphans[0].id if orphans else None
    others = [entry for entry in book.values() if entry.introduced_by != self_id]
    crowded = sorted(others, key=lambda e: introductions(e.introduced_by, book)[0], reverse=True)
    return next((entry.id for entry in (*orphans, *reversed(removed), *crowded)), None)


def after_pairing(
    book: TrustBook,
    certificate_der: bytes,
    name: str,
    self_id: str,
    limit: int = DEVICES_LIMIT,
) -> TrustDecision:
    """The entry for a device that has just proved to know the code."""
    known = book.get(certificate_id(certificate_der))
    gone = None
    if known is None and len(book) >= limit:
        gone = _least_worth(book, self_id)
        if gone is None:
            return TrustDecision(None, f"it is paired with {limit} devices already")
    counter = known.counter if known else 0
    if known is None or known.revoked:
        counter += 1
    entry = TrustedDevice(
        certificate_id(certificate_der), certificate_der, name, counter, False, self_id
    )
    return TrustDecision(entry, "paired", gone)


def after_removal(known: TrustedDevice, self_id: str) -> TrustedDevice:
    """The entry for a device that this device's user removes."""
    return replace(known, counter=known.counter + 1, revoked=True, introduced_by=self_id)


def encode_record(record: TrustRecord) -> bytes:
    """As CBOR, at most RECORD_LIMIT_BYTES."""
    return cbor.dumps([*astuple(record.device), record.signature])


def decode_record(data: bytes) -> TrustRecord:
    """Parse a record; the signature is checked by `judge`.

    Raises:
        ProtocolError: it is malformed, or its id is not its certificate's.
    """
    items = cbor.loads(data, RECORD_LIMIT_BYTES, 2)
    *device, signature = items if isinstance(items, list) and items else [None]
    fields = {"device": device, "signature": signature}
    return read_form(TrustRecord, fields, "a trust record")


def _is_newer(device: TrustedDevice, known: TrustedDevice) -> bool:
    return (device.counter, device.revoked) > (known.counter, known.revoked)


def _signed_bytes(device: TrustedDevice) -> bytes:
    # A list of fixed order encodes to the same bytes everywhere (RFC 8949, section 4.2).
    return cbor.dumps([_SIGNED_LABEL, *astuple(device)])
