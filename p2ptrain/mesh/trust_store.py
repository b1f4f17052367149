"""The trust book on disk, replaced as a whole at every change."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from types import MappingProxyType
from typing import Any

from p2ptrain.errors import PairingError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity import Identity, can_be_a_device, device_id
from p2ptrain.mesh.state_folder import BrokenFile, StateFolder
from p2ptrain.mesh.text import peer_name
from p2ptrain.mesh.trust import (
    TrustBook,
    TrustedDevice,
    TrustRecord,
    Verdict,
    after_pairing,
    after_removal,
    judge,
    sign_record,
)

log = get_logger(__name__)

TRUST_FILE = "trusted.json"
_FORMAT = "p2ptrain.trusted/1"


class TrustStore:
    """Whom this device trusts.

    Every change is on disk before it counts, but for names, and for removals that others tell of.
    """

    def __init__(self, folder: StateFolder, identity: Identity) -> None:
        """Load the book.

        Raises:
            UserError: the file is broken, or others may read it.
        """
        self._folder = folder
        self._identity = identity
        self._lock = Lock()  # names are saved in a thread
        self._book = _load(folder)

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
        """The device as people know it, or the first digits of its id."""
        device = self._book.get(peer_id)
        return device.name if device is not None else peer_id[:16]

    def add_paired(self, certificate_der: bytes, name: str) -> tuple[TrustedDevice, str | None]:
        """Remember a device that has proved to know the code; and who had to go for it.

        Raises:
            PairingError: too many devices are remembered.
        """
        verdict = after_pairing(self._book, certificate_der, name, self._identity.id)
        if verdict.entry is None:
            raise PairingError(f"{name} cannot be paired: {verdict.reason}; remove devices first")
        self._keep(verdict.entry, verdict.gone)
        return verdict.entry, verdict.gone

    def take(self, record: TrustRecord) -> Verdict:
        """Merge what another device says; the verdict says whether it changed anything.

        Raises:
            UserError: it cannot be written; a removal counts until the end of this process all the
                same.
        """
        verdict = judge(record, self._book, self._identity.id)
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
        """Every entry, with this device vouching for it: what a link's peer is told."""
        return [sign_record(device, self._identity) for device in self._book.values()]

    def record(self, peer_id: str) -> TrustRecord:
        """One entry, with this device vouching for it."""
        return sign_record(self._book[peer_id], self._identity)

    def _keep(self, entry: TrustedDevice, gone: str | None = None) -> None:
        with self._lock:
            changed = {key: known for key, known in self._book.items() if key != gone}
            changed[entry.id] = entry
            self._write(changed)
            self._book = changed

    def _write(self, book: TrustBook) -> None:
        devices = [_to_json(device) for device in book.values()]
        self._folder.write_json(TRUST_FILE, {"format": _FORMAT, "devices": devices})


def _to_json(device: TrustedDevice) -> dict[str, Any]:
    return {
        "id": device.id,
        "name": device.name,
        "certificate": base64.b64encode(device.certificate_der).decode(),
        "counter": device.counter,
        "revoked": device.revoked,
        "introduced_by": device.introduced_by,
    }


def _load(folder: StateFolder) -> dict[str, TrustedDevice]:
    value = folder.read_json(TRUST_FILE)
    if value is None:
        return {}
    try:
        if value["format"] != _FORMAT:
            raise BrokenFile(folder.path / TRUST_FILE, f"its format is not {_FORMAT}")
        devices = [_from_json(item) for item in value["devices"]]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise BrokenFile(folder.path / TRUST_FILE, "an entry is malformed") from error
    return {device.id: device for device in devices if _is_real(device)}


def _is_real(device: TrustedDevice) -> bool:
    """Whether it can be connected to at all; what cannot is not passed on to others either."""
    is_real = can_be_a_device(device.certificate_der)
    if not is_real:
        log.warning("trusted_device_forgotten", id=device.id[:16], why="its certificate is none")
    return is_real


def _from_json(item: dict[str, Any]) -> TrustedDevice:
    certificate = base64.b64decode(item["certificate"], validate=True)
    if device_id(certificate) != item["id"]:
        raise ValueError("the certificate is not that of its device")
    return TrustedDevice(
        id=item["id"],
        certificate_der=certificate,
        name=peer_name(str(item["name"])),  # others end the link over one that no device may have
        counter=int(item["counter"]),
        revoked=bool(item["revoked"]),
        introduced_by=str(item["introduced_by"]),
    )
