"""The trusted devices as people see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.errors import UserError
from p2ptrain.mesh.text import as_written
from p2ptrain.mesh.trust import TrustedDevice

ID_DIGITS_LEAST = 8
"""A device may be named by this many leading digits of its id."""


@dataclass(frozen=True, slots=True)
class Device:
    """A trusted device, for people.

    Attributes:
        id, name: as known here.
        introduced_by: name of the device that vouched for it; this device's where they paired.
        connected: whether there is a link now.
        cut_off: why this device listens to it no more; None where it does.
    """

    id: str
    name: str
    introduced_by: str
    connected: bool
    cut_off: str | None = None


def list_devices(
    book: Mapping[str, TrustedDevice],
    own_name: str,
    connected: Collection[str],
    cut_off: Mapping[str, str],
) -> list[Device]:
    """The trusted devices of `book`.

    Args:
        own_name: of this device.
        connected: ids with a link.
        cut_off: why devices were cut off, by id.
    """

    def device(entry: TrustedDevice) -> Device:
        introducer = book.get(entry.introduced_by)
        by = introducer.name if introducer is not None else own_name
        is_connected = entry.id in connected
        return Device(entry.id, entry.name, by, is_connected, cut_off.get(entry.id))

    return [device(entry) for entry in book.values() if not entry.revoked]


def find_device(name: str, devices: Sequence[Device]) -> Device:
    """The device called `name`, or whose id begins so.

    Raises:
        UserError: there is no such device, or several.
    """
    found = [device for device in devices if device.name in (name, as_written(name))]
    if not found and len(name) >= ID_DIGITS_LEAST:
        found = [device for device in devices if device.id.startswith(name)]
    if not devices:
        raise UserError(f"no paired device is called {name!r}: no other device is paired")
    if len(found) != 1:
        known = ", ".join(f"{d.name} ({d.id[:ID_DIGITS_LEAST]})" for d in devices)
        many = "several paired devices are" if found else "no paired device is"
        raise UserError(f"{many} called {name!r}: give a name or the digits of an id of {known}")
    return found[0]
