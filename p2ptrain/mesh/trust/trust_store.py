"""The trust book on disk, replaced as a whole at every change, and the TLS contexts of its state.

Contexts are made when needed, and made again once others are trusted.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from p2ptrain.errors import PairingError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.identity import Identity, can_be_a_device
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.trust.trust import (
    DEVICES_LIMIT,
    Counter,
    Digest,
    TrustBook,
    TrustDecision,
    TrustedDevice,
    TrustRecord,
    after_pairing,
    after_removal,
    judge,
    sign_record,
)
from p2ptrain.net.fields import PeerName
from p2ptrain.net.forms import By, write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.net.transport.tls import client_context, server_context

log = get_logger(__name__)

TRUST_FILE = "trusted.json"

Pinned: TypeAlias = tuple[bytes, ...]
"""The certificates that a context accepts."""


class TrustStore:
    """Whom this device trusts.

    Every change is on disk before it counts, but for names, and for removals that others tell of.
    """

    def __init__(
        self, folder: StateFolder, identity: Identity, devices_limit: int = DEVICES_LIMIT
    ) -> None:
        """Load the book.

        Args:
            devices_limit: most devices remembered.

        Raises:
            UserError: the file is broken, or others may read it.
        """
        self._folder = folder
        self._identity = identity
        self._limit = devices_limit
        self._lock = Lock()  # names are saved in a thread
        self._book = _load(folder)
        self._made: tuple[Pinned, tuple[ssl.SSLContext, ssl.SSLContext]] | None = None

    @property
    def book(self) -> TrustBook:
        """All entries, removed devices included."""
        return MappingProxyType(self._book)

    @property
    def trusted(self) -> Mapping[str, TrustedDevice]:
        """The devices that are trusted now, by id."""
        return {key: device for key, device in self._book.items() if not device.revoked}

    def is_trusted(self, peer_id: str) -> bool:
        """Whether that device may connect."""
        device = self._book.get(peer_id)
        return device is not None and not device.revoked

    def is_removed(self, peer_id: str) -> bool:
        """Whether that device was trusted once and then removed."""
        device = self._book.get(peer_id)
        return device is not None and device.revoked

    def name(self, peer_id: str) -> str:
        """The device's display name, or the first digits of its id."""
        device = self._book.get(peer_id)
        return device.name if device is not None else peer_id[:16]

    def add_paired(self, certificate_der: bytes, name: str) -> tuple[TrustedDevice, str | None]:
        """Remember a device that has proved to know the code; and who had to go for it.

        Raises:
            PairingError: too many devices are remembered.
        """
        verdict = after_pairing(self._book, certificate_der, name, self._identity.id, self._limit)
        if verdict.entry is None:
            raise PairingError(f"{name} cannot be paired: {verdict.reason}; remove devices first")
        self._keep(verdict.entry, verdict.gone)
        return verdict.entry, verdict.gone

    def take(self, record: TrustRecord) -> TrustDecision:
        """Merge what another device says; the verdict says whether it changed anything.

        Raises:
            UserError: it cannot be written; a removal counts until the end of this process all the
                same.
        """
        verdict = judge(record, self._book, self._identity.id, self._limit)
        entry = verdict.entry
        if entry is not None:
            if entry.revoked:
                self._book = {**self._book, entry.id: entry}
            self._keep(entry, verdict.gone)
        return verdict

    def revoke(self, peer_id: str) -> TrustedDevice:
        """Remove a device that is trusted now."""
        removed = after_removal(self._book[peer_id], self._identity.id)
        self._keep(removed)
        return removed

    def rename(self, peer_id: str, name: str) -> bool:
        """How the device calls itself now; True where that is new, and to be saved by `save`."""
        with self._lock:
            known = self._book.get(peer_id)
            if known is None or known.name == name:
                return False
            self._book = {**self._book, peer_id: replace(known, name=name)}
            return True

    def save(self) -> None:
        """Write the book as it is now; may be called in a thread.

        Raises:
            UserError: it cannot be written.
        """
        with self._lock:
            self._write(self._book)

    def records(self) -> list[TrustRecord]:
        """Every entry, with this device vouching for it: what a link's peer gets."""
        return [sign_record(device, self._identity) for device in self._book.values()]

    def record(self, peer_id: str) -> TrustRecord:
        """One entry, with this device vouching for it."""
        return sign_record(self._book[peer_id], self._identity)

    def server_context(self) -> ssl.SSLContext:
        """Accept with this: from the next connection on a change of trust counts."""
        return self._contexts()[0]

    def client_context(self) -> ssl.SSLContext:
        """Dial with this."""
        return self._contexts()[1]

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        # Our own certificate too: that is how a copy of this state folder is found out.
        trusted = (entry.certificate_der for entry in self.trusted.values())
        pinned, own = (self._identity.certificate_der, *trusted), self._identity.pem_file
        if self._made is None or self._made[0] != pinned:
            self._made = pinned, (server_context(own, pinned), client_context(own, pinned))
        return self._made[1]

    def _keep(self, entry: TrustedDevice, gone: str | None = None) -> None:
        with self._lock:
            changed = {key: known for key, known in self._book.items() if key != gone}
            changed[entry.id] = entry
            self._write(changed)
            self._book = changed

    def _write(self, book: TrustBook) -> None:
        self._folder.write_form(TRUST_FILE, _Book("p2ptrain.trusted/1", tuple(book.values())))


def _from_base64(value: object) -> bytes:
    return base64.b64decode(value if isinstance(value, str) else "?", validate=True)


def _to_base64(der: bytes) -> str:
    return base64.b64encode(der).decode()


@dataclass(frozen=True, slots=True)
class _StoredDevice:
    """A device in the file."""

    id: Digest
    name: PeerName  # others end the link over one that no device may have
    certificate: Annotated[bytes, By(_from_base64, _to_base64)]
    counter: Counter
    revoked: bool
    introduced_by: Digest


def _read_kept(value: object) -> TrustedDevice:
    kept = read_form(_StoredDevice, value, "a device")
    rest = (kept.name, kept.counter, kept.revoked, kept.introduced_by)
    return TrustedDevice(kept.id, kept.certificate, *rest)


def _write_kept(d: TrustedDevice) -> dict[str, Any]:
    kept = _StoredDevice(d.id, d.name, d.certificate_der, d.counter, d.revoked, d.introduced_by)
    return write_form(kept)


@dataclass(frozen=True, slots=True)
class _Book:
    format: Literal["p2ptrain.trusted/1"]
    devices: tuple[Annotated[TrustedDevice, By(_read_kept, _write_kept)], ...]


def is_paired(folder: StateFolder) -> bool:
    """Whether the device of this folder trusts any other. Raises UserError: as `TrustStore`."""
    return any(not device.revoked for device in _load(folder).values())


def _load(folder: StateFolder) -> dict[str, TrustedDevice]:
    book = folder.read_form(TRUST_FILE, _Book)
    devices = book.devices if book is not None else ()
    return {device.id: device for device in devices if _is_real(device)}


def _is_real(device: TrustedDevice) -> bool:
    """Whether it can be connected to at all; what cannot is not passed on to others either."""
    is_real = can_be_a_device(device.certificate_der)
    if not is_real:
        log.warning("trusted_device_forgotten", id=device.id[:16], why="its certificate is none")
    return is_real
