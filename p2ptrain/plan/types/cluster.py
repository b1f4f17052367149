"""The devices a plan may use and the links between them: the file `p2ptrain.cluster/1`.

A device's overheads are what it spends beside its units' forwards and backwards; the plain cost
model leaves them out. On a slow device they are a large part of a round of small micro-batches: a
message costs the event loop, the framing and TLS about as much processor time as a small unit's
forward, and it comes out of the same core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Annotated, Any, ClassVar, TypeAlias

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By, Flat, Key, Rare
from p2ptrain.plan.types.planning_file import (
    MANY,
    Factor,
    Name,
    Number,
    Whole,
    read_file,
    write_file,
)
from p2ptrain.plan.types.unit_times import Times


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of one device's own time, as it takes them beside its computing.

    Attributes:
        message_seconds: at either end of a message, whatever it carries.
        byte_seconds: at either end, for each byte: framing, TLS, the kernel.
        update_byte_seconds: of an update, for each byte of parameters and of optimizer state.
    """

    former_keys: ClassVar = frozenset({"pack_byte_seconds", "unpack_byte_seconds"})

    message_seconds: Number
    byte_seconds: Number
    update_byte_seconds: Number

    def times_slowdown(self, slowdown: float) -> Overheads:
        """The same work on a device that takes `slowdown` times as long."""
        if slowdown == 1.0:
            return self
        return Overheads(
            *(getattr(self, field.name) * slowdown for field in dataclasses.fields(self))
        )


REFERENCE = Overheads(
    message_seconds=5e-4,
    byte_seconds=1.2e-9,
    update_byte_seconds=1e-10,
)
"""One core of a server: processor time of the event loop's thread in real rounds
(1.0 to 1.4 ns a byte; messages from 0.34 to 0.62 ms, the more the
colder caches are)."""


FORMAT = "p2ptrain.cluster/1"

PROCESSOR = "cpu"
"""The kind of devices that compute with a processor, whichever."""

MAX_NAMES = 12
"""Devices that an error names."""


@dataclass(frozen=True, slots=True)
class ClusterLink:
    """One direction between two devices."""

    bytes_per_s: Factor
    latency_s: Number


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
        compute: with what; devices of one kind compute the same bits.
        machine: where several devices are one machine's, what they have in common: they share its
            network interface, and what goes between them occupies none. They share its cores too:
            in their times, which are measured while all of them are busy.
    """

    name: Name
    memory_bytes: Whole
    slowdown: Factor = 1.0
    holder: Annotated[bool, Rare()] = False
    times: Times | None = None
    overheads: Overheads | None = None
    compute: Annotated[Name, Rare()] = PROCESSOR
    machine: Annotated[Name, Rare()] = ""


@dataclass(frozen=True, slots=True)
class _ListedLink:
    sender: Annotated[Name, Key("from")]
    receiver: Annotated[Name, Key("to")]
    rate: Annotated[ClusterLink, Flat()]


def _by_ends(listed: Sequence[_ListedLink]) -> dict[tuple[str, str], ClusterLink]:
    links: dict[tuple[str, str], ClusterLink] = {}
    for link in listed:
        ends = link.sender, link.receiver
        if ends in links:
            raise OptionError(f'the link from "{ends[0]}" to "{ends[1]}" is given twice')
        links[ends] = link.rate
    return links


def _listed(links: Mapping[tuple[str, str], ClusterLink]) -> list[_ListedLink]:
    return [_ListedLink(*ends, link) for ends, link in links.items()]


Links: TypeAlias = Annotated[
    Mapping[tuple[str, str], ClusterLink],
    By(_by_ends, _listed, Annotated[tuple[_ListedLink, ...], MANY]),
]
"""By (sender, receiver)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices, exactly one of them the holder, and the links by (sender, receiver).

    `default_link` stands for every direction that `links` lacks; None where it lacks none.
    """

    devices: Annotated[tuple[ClusterDevice, ...], MANY]
    default_link: ClusterLink | None = None
    links: Links = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.devices:
            raise OptionError("devices: no device at all")
        names: set[str] = set()
        for device in self.devices:
            if device.name in names:
                raise OptionError(f'devices: the name "{device.name}" is given twice')
            names.add(device.name)
        holders = [device.name for device in self.devices if device.holder]
        if len(holders) != 1:
            raise OptionError(
                'devices: exactly one device must have "holder": true, '
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
        return write_file(self, FORMAT)

    @classmethod
    def from_json(cls, value: object, where: str = "cluster") -> Cluster:
        """Read the file's content; OptionError names the field that is missing or wrong."""
        return read_file(cls, FORMAT, value, where)


def unknown_device(name: str, known: Sequence[str]) -> OptionError:
    """The error that no device has that name; it names some that exist."""
    shown = sorted(known)[:MAX_NAMES]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return OptionError(f'no device "{name}" in the cluster (known: {", ".join(shown)}{more})')


def _check_links(cluster: Cluster, names: set[str]) -> None:
    for sender, receiver in cluster.links:
        for name in (sender, receiver):
            if name not in names:
                raise OptionError(f'links: "{name}" is not among the devices')
        if sender == receiver:
            raise OptionError(f'links: a link from "{sender}" to itself')
    if cluster.default_link is not None:
        return
    for sender, receiver in permutations(sorted(names), 2):
        if (sender, receiver) not in cluster.links:
            raise OptionError(
                f'default_link: missing, and links does not list "{sender}" to "{receiver}"'
            )
