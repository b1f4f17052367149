"""What a device remembers of itself and of where others were: small files in its state folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2ptrain.logs import get_logger
from p2ptrain.mesh.addresses import Address, is_usable
from p2ptrain.mesh.state_folder import BrokenFile, StateFolder
from p2ptrain.mesh.text import checked_name

log = get_logger(__name__)

DEVICE_FILE = "device.json"
ADDRESSES_FILE = "addresses.json"


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
        value = _mapping(folder, DEVICE_FILE)
        self.term = _whole(value.get("term", 0))
        known_asked, known = value.get("asked_name"), value.get("name")
        self.asked_name = checked_name(asked_name or str(known_asked or fallback))
        same = known is not None and known_asked == self.asked_name
        self.name = str(known) if same else self.asked_name
        self._is_saved = False
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
        found: dict[str, list[Address]] = {}
        for device_id, entries in _hints(self._folder).items():
            pairs = [_address(entry) for entry in entries] if isinstance(entries, list) else []
            found[device_id] = [pair for pair in pairs if pair is not None]
        return found

    def save_addresses(self, addresses: Mapping[str, list[Address]]) -> None:
        """Replace the last known addresses."""
        self._folder.write_json(ADDRESSES_FILE, dict(addresses))

    def _save(self) -> None:
        value = {"name": self.name, "asked_name": self.asked_name, "term": self.term}
        self._is_saved = False
        self._folder.write_json(DEVICE_FILE, value)
        self._is_saved = True


def _mapping(folder: StateFolder, name: str) -> dict[str, Any]:
    value = folder.read_json(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BrokenFile(folder.path / name, "it does not hold an object")
    return value


def _hints(folder: StateFolder) -> dict[str, Any]:
    try:
        return _mapping(folder, ADDRESSES_FILE)
    except BrokenFile as error:
        log.warning("addresses_forgotten", why=error.why)
        return {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _address(entry: object) -> Address | None:
    match entry:
        case [str(host), int(port)] if is_usable((host, port)):
            return host, port
    return None
