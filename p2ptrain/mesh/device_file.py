"""What a device remembers of itself and of where others were: small files in its state folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from p2ptrain.errors import ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.addresses import Address, is_usable
from p2ptrain.mesh.state_folder import BrokenFile, StateFolder
from p2ptrain.mesh.text import checked_name
from p2ptrain.net.forms import Range
from p2ptrain.net.read_form import read_form
from p2ptrain.net.write_form import write_form

log = get_logger(__name__)

DEVICE_FILE = "device.json"
ADDRESSES_FILE = "addresses.json"


@dataclass(frozen=True, slots=True)
class _Device:
    name: str = ""
    asked_name: str = ""
    term: Annotated[int, Range(0)] = 0


@dataclass(frozen=True, slots=True)
class _Hints:
    devices: Mapping[str, tuple[Address, ...]]


class DeviceFile:
    """Name and election term of this device, and the addresses at which others proved themselves.

    Attributes:
        name: what the others call this device.
        asked_name: what its person asked for; `name` may have "-2" behind it.
        term: highest election term that this device voted or followed in.
    """

    def __init__(self, folder: StateFolder, asked_name: str | None, fallback: str) -> None:
        """Load what is there.

        Args:
            folder: the state folder.
            asked_name: from this start's options; None keeps the last one.
            fallback: where no name was ever given.

        Raises:
            OptionError: the name cannot be used.
            UserError: a file is broken.
        """
        self._folder = folder
        known = folder.read_form(DEVICE_FILE, _Device) or _Device()
        self.term = known.term
        self.asked_name = checked_name(asked_name or known.asked_name or fallback)
        self.name = known.name if known.asked_name == self.asked_name else self.asked_name
        self._is_saved = False
        self._saved_addresses: Mapping[str, list[Address]] | None = None
        self._save()

    def rename(self, name: str) -> None:
        """Remember the name that the household knows this device by.

        Raises:
            UserError: it cannot be written; until the end of this process it counts all the same.
        """
        self.name = name
        self._save()

    def keep_term(self, term: int) -> None:
        """Remember the term before this device acts in it; it falls only where it was absurd.

        Raises:
            UserError: it cannot be written; until the end of this process it counts all the same,
                and is written with the next call.
        """
        if term != self.term or not self._is_saved:
            self.term = term
            self._save()

    def addresses(self) -> dict[str, list[Address]]:
        """Last known addresses by device id; what is unusable is dropped: they are only hints."""
        try:
            value = self._folder.read_json(ADDRESSES_FILE)
            known = read_form(_Hints, {"devices": value or {}}, ADDRESSES_FILE).devices
        except (BrokenFile, ProtocolError) as error:
            log.warning("addresses_forgotten", why=str(error))
            return {}
        return {device_id: [*filter(is_usable, known[device_id])] for device_id in known}

    def save_addresses(self, addresses: Mapping[str, list[Address]]) -> None:
        """Replace the last known addresses, unless they are on disk already. Raises UserError."""
        if addresses != self._saved_addresses:
            self._folder.write_json(ADDRESSES_FILE, dict(addresses))
            self._saved_addresses = addresses

    def _save(self) -> None:
        self._is_saved = False
        device = _Device(self.name, self.asked_name, self.term)
        self._folder.write_json(DEVICE_FILE, write_form(device))
        self._is_saved = True
