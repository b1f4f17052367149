"""The trusted devices as people see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.errors import UserError
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
    """

    id: str
    name: str
    introduced_by: str
    connected: bool


def list_devices(
    book: Mapping[str, TrustedDevice], own_name: str, connected: Collection[str]
) -> list[Device]:
    """The trusted devices of `book`; `connected` are the ids with a link."""

    def device(entry: TrustedDevice) -> Device:
        introducer = book.get(entry.introduced_by)
        by = introducer.name if introducer is not None else own_name
        return Device(entry.id, entry.name, by, entry.id in connected)

    return [device(entry) for entry in book.values() if not entry.revoked]


def find_device(name: str, devices: Sequence[Device]) -> Device:
    """The device called `name`, or whose id begins so.

    Raises:
        UserError: there is no such device, or several.
    """
    found = [device for device in devices if device.name == name]
    if not found and len(name) >= ID_DIGITS_LEAST:
        found = [device for device in devices if device.id.startswith(name)]
    if not devices:
        raise UserError(f"no trusted device is called {name!r}: this device trusts no other one")
    if len(found) != 1:
        known = ", ".join(f"{d.name} ({d.id[:ID_DIGITS_LEAST]})" for d in devices)
        many = "several trusted devices are" if found else "no trusted device is"
        raise UserError(f"{many} called {name!r}: give a name or the digits of an id of {known}")
    return found[0]
