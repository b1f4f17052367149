"""What a device stores about itself and about the addresses of others: small files of the folder.

Links come up often, a device may change its name as often as it likes, and a disk may be slow or
full. So changes are collected and written together, at intervals, in a thread beside the event
loop. What cannot be written still counts until this process ends; it costs no membership, and the
user gets one warning.

Without `--name` a device is called after its machine, unless the host name says nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from p2ptrain.aio.tasks import TaskScope, to_the_end
from p2ptrain.errors import ProtocolError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.discovery.addresses import is_usable
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.fields import NAME_LIMIT_CHARACTERS, checked_name, peer_name
from p2ptrain.net.forms import Range
from p2ptrain.net.link.stream import Address
from p2ptrain.net.read_form import read_form

log = get_logger(__name__)

DEVICE_FILE = "device.json"

ADDRESSES_FILE = "addresses.json"


@dataclass(frozen=True, slots=True)
class _DeviceFields:
    name: str = ""
    asked_name: str = ""
    term: Annotated[int, Range(0)] = 0


@dataclass(frozen=True, slots=True)
class _Hints:
    devices: Mapping[str, tuple[Address, ...]]


class DeviceRecord:
    """Name and election term of this device, and the addresses at which others proved themselves.

    Attributes:
        name: what the others call this device.
        asked_name: what its user asked for; `name` may have "-2" behind it.
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
        known = folder.read_form(DEVICE_FILE, _DeviceFields) or _DeviceFields()
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
        device = _DeviceFields(self.name, self.asked_name, self.term)
        self._folder.write_form(DEVICE_FILE, device)
        self._is_saved = True


PAUSE_SECONDS = 5.0
"""Between two writes. Shorter: a liar keeps the disk busy; longer: more is lost by a power
failure."""


class DiskWriter:
    """One for all files of a mesh."""

    def __init__(
        self,
        tasks: TaskScope,
        notices: WarnOnce,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._tasks = tasks
        self._notices = notices
        self._sleep = sleep
        self._due: dict[str, Callable[[], None]] = {}
        self._writing: asyncio.Task[None] | None = None

    def soon(self, write: Callable[[], None], loss: str) -> None:
        """Call `write` in a thread soon; of those with one `loss` only the last.

        Args:
            write: may raise UserError.
            loss: the warning for the user if it does.
        """
        self._due[loss] = write
        if self._writing is None or self._writing.done():
            self._writing = self._tasks.spawn(self._keep_writing(), "write to disk")

    async def close(self) -> None:
        """Write what is not on disk yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        await self._write_all()

    async def _keep_writing(self) -> None:
        while self._due:
            await self._write_all()
            await self._sleep(PAUSE_SECONDS)

    async def _write_all(self) -> None:
        while self._due:
            loss, write = self._due.popitem()
            try:  # the next process may write the same file: this thread must be done
                await to_the_end(write)
            except UserError as error:
                self._notices.warn(f"{error}: {loss}")


_MEANINGLESS_NAMES = frozenset({"localhost", "unnamed", ""})


def default_name(device_id: str) -> str:
    """The host's name without its domain; else "device-" and the first digits of the id."""
    return name_of_host(socket.gethostname()) or f"device-{device_id[:4]}"


def name_of_host(host_name: str) -> str | None:
    """`host_name` as a device's name, or None where it does not say which device this is."""
    first = host_name.partition(".")[0]
    name = peer_name(first)[:NAME_LIMIT_CHARACTERS].strip(" .")
    return None if name.lower() in _MEANINGLESS_NAMES else name
