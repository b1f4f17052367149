"""Sends introductions and removals through the household.

When a link comes up each side sends the other every device it knows, removed ones included;
a device passes on what is news to it to all its links at once. Records are signed by their sender
(trust.py); the addresses beside them are hints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from p2ptrain.errors import ProtocolError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.links.connections import Connections
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.mesh.trust.trust import (
    RECORD_LIMIT_BYTES,
    TrustedDevice,
    TrustRecord,
    decode_record,
    encode_record,
)
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.net.forms import Length, write_form
from p2ptrain.net.link.stream import Address
from p2ptrain.net.message import Message
from p2ptrain.net.read_form import read_form

log = get_logger(__name__)

TRUST_KIND = "trust.record"

ADDRESSES_LIMIT = 4


@dataclass(frozen=True, slots=True)
class _TrustNotice:
    record: Annotated[bytes, Length(RECORD_LIMIT_BYTES)]
    addresses: Annotated[tuple[Address, ...], Length(ADDRESSES_LIMIT)]


class TrustExchange:
    """Keeps the trust books of a household alike.

    Args:
        changed: (entry, addresses) this device's trust has changed.
    """

    def __init__(
        self,
        store: TrustStore,
        connections: Connections,
        guard: Guard,
        notices: WarnOnce,
        changed: Callable[[TrustedDevice, Sequence[Address]], None],
    ) -> None:
        self._store = store
        self._connections = connections
        self._guard = guard
        self._notices = notices
        self._changed = changed

    def link_up(self, peer_id: str) -> None:
        """Tell the device all that we know."""
        for record in self._store.records():
            self._notify(peer_id, record)

    def spread(self, device_id: str, except_for: str = "") -> None:
        """Tell all what we know of one device."""
        record = self._store.record(device_id)
        for peer_id in self._connections.connected():
            if peer_id != except_for:
                self._notify(peer_id, record)

    async def take(self, peer_id: str, message: Message) -> None:
        """Handler of TRUST_KIND."""
        try:
            notice = read_form(_TrustNotice, message.fields, "a trust record's message", extra=True)
            record = decode_record(notice.record)
        except ProtocolError as error:
            self._guard.note(peer_id, Offence.MALFORMED, why=str(error))
            self._connections.cut(peer_id, str(error))
            return
        entry, reason = self._taken(record, peer_id)
        log.debug("trust_record", about=record.device.id[:16], by=peer_id[:16], why=reason)
        if entry is not None:
            log.info("trust", name=entry.name, change=reason, by=peer_id[:16])
            self._changed(entry, notice.addresses)
            self.spread(entry.id, except_for=peer_id)

    def _taken(self, record: TrustRecord, peer_id: str) -> tuple[TrustedDevice | None, str]:
        """What has changed, and why it has or has not."""
        about = record.device
        try:
            verdict = self._store.take(record)
        except UserError as error:  # a full disk
            if not self._store.is_removed(about.id):
                self._notices.warn(f"{error}: {about.name} is not paired with this device yet")
                return None, str(error)
            self._notices.warn(
                f"{error}: {about.name} was removed, but may come back for a moment after the "
                "next start"
            )
            return self._store.book[about.id], "removed"
        if verdict.too_many:
            self._guard.note(peer_id, Offence.INTRODUCTIONS)
        return verdict.entry, verdict.reason

    def _notify(self, peer_id: str, record: TrustRecord) -> None:
        about = record.device.id
        if about != peer_id:
            addresses = tuple(self._connections.addresses(about).proven[:ADDRESSES_LIMIT])
            notice = _TrustNotice(encode_record(record), addresses)
            self._connections.post(peer_id, Message(TRUST_KIND, write_form(notice)))
