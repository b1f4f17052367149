"""The devices a plan may use and the links between them: the file `p2ptrain.cluster/1`.

A device's overheads are what it spends beside its units' forwards and backwards; the plain cost
model leaves them out. On a slow device they are a large part of a round of small micro-batches: a
message costs the event loop, the framing and TLS about as much processor time as a small unit's
forward, and it comes out of the same core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

from p2ptrain.errors import OptionError
from p2ptrain.plan.types import json_fields
from p2ptrain.plan.types.unit_times import TimeTable

OF_OLDER_FILES = ("pack_byte_seconds", "unpack_byte_seconds")
"""Read and not used."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of one device's own time, as it takes them beside its computing.

    Attributes:
        message_seconds: at either end of a message, whatever it carries.
        byte_seconds: at either end, for each byte: framing, TLS, the kernel.
        update_byte_seconds: of an update, for each byte of parameters and of optimizer state.
    """

    message_seconds: float
    byte_seconds: float
    update_byte_seconds: float

    def times_slowdown(self, slowdown: float) -> Overheads:
        """The same work on a device that takes `slowdown` times as long."""
        if slowdown == 1.0:
            return self
        return Overheads(
            *(getattr(self, field.name) * slowdown for field in dataclasses.fields(self))
        )

    def to_json(self) -> dict[str, float]:
        """As in a device's "overheads"."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object, where: str) -> Overheads:
        """Read a device's "overheads"; OptionError names the field that is missing or wrong."""
        names = [field.name for field in dataclasses.fields(cls)]
        entry = json_fields.members(value, where, names, OF_OLDER_FILES)
        return cls(*(json_fields.number(entry[name], f"{where}.{name}") for name in names))


REFERENCE = Overheads(
    message_seconds=5e-4,
    byte_seconds=1.2e-9,
    update_byte_seconds=1e-10,
)
"""One core of a server: processor time of the event loop's thread in real rounds
(1.0 to 1.4 ns a byte; messages from 0.34 to 0.62 ms, the more the
colder caches are)."""


FORMAT = "p2ptrain.cluster/1"

MAX_NAMES = 12
"""Devices that an error names."""


@dataclass(frozen=True, slots=True)
class ClusterLink:
    """One direction between two devices."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """One device.

    Attributes:
        memory_bytes: what p2ptrain may use of it.
        slowdown: its time is the profile's times this; unused where it has its own `times`.
        holder: it has the data, and feeds the first and the last stage.
        times: measured on this device; None = the profile's.
        overheads: measured on this device; None = the usual ones times its slowdown. Only plans
            that model what the runtime does use them.
    """

    name: str
    memory_bytes: int
    slowdown: float = 1.0
    holder: bool = False
    times: TimeTable | None = None
    overheads: Overheads | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices, exactly one of them the holder, and the links by (sender, receiver).

    `default_link` stands for every direction that `links` lacks; None where it lacks none.
    """

    devices: tuple[ClusterDevice, ...]
    default_link: ClusterLink | None = None
    links: Mapping[tuple[str, str], ClusterLink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.devices:
            raise OptionError("cluster.devices: no device at all")
        names: set[str] = set()
        for device in self.devices:
            if device.name in names:
                raise OptionError(f'cluster.devices: the name "{device.name}" is given twice')
            names.add(device.name)
        holders = [device.name for device in self.devices if device.holder]
        if len(holders) != 1:
            raise OptionError(
                'cluster.devices: exactly one device must have "holder": true, '
                f"found {len(holders)} {holders or ''}".rstrip()
            )
        _check_links(self, names)

    @property
    def holder(self) -> ClusterDevice:
        """The device that has the data."""
        return next(device for device in self.devices if device.holder)

    def device(self, name: str) -> ClusterDevice:
        """The device of that name; OptionError where there is none."""
        for device in self.devices:
            if device.name == name:
                return device
        raise unknown_device(name, [device.name for device in self.devices])

    def link(self, sender: str, receiver: str) -> ClusterLink:
        """The direction from `sender` to another device, `receiver`."""
        link = self.links.get((sender, receiver), self.default_link)
        if link is None:  # __post_init__ has made sure of every pair of known devices
            raise OptionError(f'no link from "{sender}" to "{receiver}" in the cluster')
        return link

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "devices": [_device_to_json(device) for device in self.devices],
        }
        if self.default_link is not None:
            content["default_link"] = _link_to_json(self.default_link)
        content["links"] = [
            {"from": sender, "to": receiver, **_link_to_json(link)}
            for (sender, receiver), link in self.links.items()
        ]
        return content

    @classmethod
    def from_json(cls, value: object, where: str = "cluster") -> Cluster:
        """Read the file's content; OptionError names the field that is missing or wrong."""
        json_fields.file_format(value, where, FORMAT)
        entry = json_fields.members(value, where, ("format", "devices"), ("default_link", "links"))
        listed = json_fields.items(entry["devices"], f"{where}.devices")
        default: ClusterLink | None = None
        if "default_link" in entry:
            at = f"{where}.default_link"
            default = _link(json_fields.members(entry["default_link"], at, _LINK_FIELDS), at)
        return cls(
            devices=tuple(_device(d, f"{where}.devices[{i}]") for i, d in enumerate(listed)),
            default_link=default,
            links=_links(entry.get("links", []), f"{where}.links"),
        )


def unknown_device(name: str, known: Sequence[str]) -> OptionError:
    """The error that no device has that name; it names some that exist."""
    shown = sorted(known)[:MAX_NAMES]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return OptionError(f'no device "{name}" in the cluster (known: {", ".join(shown)}{more})')


_LINK_FIELDS = ("bytes_per_s", "latency_s")


def _check_links(cluster: Cluster, names: set[str]) -> None:
    for sender, receiver in cluster.links:
        for name in (sender, receiver):
            if name not in names:
                raise OptionError(f'cluster.links: "{name}" is not among the devices')
        if sender == receiver:
            raise OptionError(f'cluster.links: a link from "{sender}" to itself')
    if cluster.default_link is not None:
        return
    for sender, receiver in permutations(sorted(names), 2):
        if (sender, receiver) not in cluster.links:
            raise OptionError(
                f'cluster.default_link: missing, and links does not list "{sender}" to "{receiver}"'
            )


def _device(value: object, where: str) -> ClusterDevice:
    optional = ("slowdown", "holder", "times", "overheads")
    entry = json_fields.members(value, where, ("name", "memory_bytes"), optional)
    slowdown = entry.get("slowdown", 1.0)
    own = entry.get("times")
    return ClusterDevice(
        name=json_fields.text(entry["name"], f"{where}.name"),
        memory_bytes=json_fields.whole(entry["memory_bytes"], f"{where}.memory_bytes"),
        slowdown=json_fields.number(slowdown, f"{where}.slowdown", above_zero=True),
        holder=json_fields.truth(entry.get("holder", False), f"{where}.holder"),
        times=None if "times" not in entry else TimeTable.from_json(own, f"{where}.times"),
        overheads=(
            Overheads.from_json(entry["overheads"], f"{where}.overheads")
            if "overheads" in entry
            else None
        ),
    )


def _links(value: object, where: str) -> dict[tuple[str, str], ClusterLink]:
    links: dict[tuple[str, str], ClusterLink] = {}
    for i, item in enumerate(json_fields.items(value, where)):
        at = f"{where}[{i}]"
        entry = json_fields.members(item, at, ("from", "to", *_LINK_FIELDS))
        ends = (
            json_fields.text(entry["from"], f"{at}.from"),
            json_fields.text(entry["to"], f"{at}.to"),
        )
        if ends in links:
            raise OptionError(f'{at}: the link from "{ends[0]}" to "{ends[1]}" is given twice')
        links[ends] = _link(entry, at)
    return links


def _link(entry: dict[str, object], where: str) -> ClusterLink:
    rate = json_fields.number(entry["bytes_per_s"], f"{where}.bytes_per_s", above_zero=True)
    return ClusterLink(rate, json_fields.number(entry["latency_s"], f"{where}.latency_s"))


def _link_to_json(link: ClusterLink) -> dict[str, float]:
    return {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}


def _device_to_json(device: ClusterDevice) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "slowdown": device.slowdown,
    }
    if device.holder:
        entry["holder"] = True
    if device.times is not None:
        entry["times"] = device.times.to_json()
    if device.overheads is not None:
        entry["overheads"] = device.overheads.to_json()
    return entry
