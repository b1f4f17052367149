"""The mesh as the rooms above it see it, whatever carries the messages.

`network_mesh.NetworkMesh` joins devices; `lone_mesh.LoneMesh` is one device alone (`--local`).
Messages within one (peer, priority) keep their order; each is delivered at most once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from p2ptrain.manners import condition
from p2ptrain.net.message import Message, PartsAllocator, Priority


class MemberState(StrEnum):
    """A member's state as this device sees it (SWIM)."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


GONE = frozenset({MemberState.DEAD, MemberState.LEFT})
"""Of members that are not here any more."""


@dataclass(frozen=True, slots=True)
class MeshMember:
    """One device of the household.

    Attributes:
        id: 64 lower-case hex digits, SHA-256 of the device's certificate.
        name: unique among members; shown to users.
        state: as this device sees it.
        info: what the device says of itself (CBOR-able, at most 1 KiB): "memory_bytes",
            "threads", "version", "role" ("member" or "holder"), ...
    """

    id: str
    name: str
    state: MemberState
    info: Mapping[str, int | float | str]

    @property
    def rests(self) -> bool:
        """Whether it is here and takes no part in trainings now."""
        return self.state is MemberState.ALIVE and condition.rests(self.info)

    @property
    def sentence(self) -> str:
        """Why it does not work as hard as it could; "" where it does."""
        return condition.DeviceCondition.of_info(self.info).sentence


@dataclass(frozen=True, slots=True)
class MeshCoordinator:
    """Who coordinates. `term` only ever rises."""

    id: str
    name: str
    term: int


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A member appeared or changed its state or its name.

    Attributes:
        certain: with "dead" and "left": what its process had is gone for good, because that process
            is known to have ended (its address refuses connections, a new process of the device
            showed up, it said good-bye) or because the device was removed. False: it was silent for
            too long, and may be running out of reach. May follow later, in a second
            "dead".
        described: it is alive as before, and says something else of itself.
    """

    member: MeshMember
    reason: str
    certain: bool = False
    described: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorChanged:
    """A coordinator was elected, or (None) the old one is gone and none is elected yet."""

    coordinator: MeshCoordinator | None


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a member ended; what was queued on it or under way may never arrive.

    The member may be alive: the mesh dials again by itself.
    """

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link to a member is there, for the first time or again."""

    peer_id: str


MeshEvent: TypeAlias = MemberChanged | CoordinatorChanged | LinkLost | LinkUp

Handler: TypeAlias = Callable[[str, Message], Awaitable[Message | None]]
"""(peer id, message) -> the reply of a `call`, or None. A handler's `Error` becomes the caller's:
UserError and PeerError travel by class name and text. Handlers of one (peer, kind) run one after
the other in the order of arrival; those of different kinds or peers run side by side."""

Take: TypeAlias = Callable[[str, Message], None]
"""(peer id, message), called while messages are read: it must be quick and must not wait. Errors
are treated as a handler's; a `call` is answered by an empty message. In order for each peer."""


class Mesh(Protocol):
    """The household as one device sees it. Use from one event loop only."""

    @property
    def self_id(self) -> str:
        """This device's id."""

    @property
    def name(self) -> str:
        """This device's name; may become NAME-2 when a member already has it."""

    @property
    def members(self) -> Mapping[str, MeshMember]:
        """By id, this device included; the dead and the departed stay listed for a while."""

    @property
    def connected(self) -> frozenset[str]:
        """Ids of the devices to which there is a link now; this device is not among them."""

    @property
    def coordinator(self) -> MeshCoordinator | None:
        """The coordinator this device knows of."""

    def distrust(self, device_id: str, seconds: float) -> None:
        """For so long that device does not coordinate, as this one sees it.

        It is neither followed nor voted for, and its word in elections counts for nothing. It stays
        a member. Nothing happens where it is this device.
        """

    def subscribe(self, callback: Callable[[MeshEvent], None]) -> Callable[[], None]:
        """Call `callback` (never blocking) at each event; returns the way to stop it."""

    def route(self, kind: str, handler: Handler, parts: PartsAllocator | None = None) -> None:
        """Give messages of `kind` to `handler`. Without `parts`, a message with parts is refused.

        A kind may be routed again (the newest wins); an unrouted kind is refused with an error
        that the sender of a `call` gets, and counted, not fatal, otherwise.
        """

    def route_now(self, kind: str, take: Take, parts: PartsAllocator | None = None) -> None:
        """As `route`, for what comes often: `take` is called at once, without a task's turn."""

    def unroute(self, kind: str) -> None:
        """Stop routing `kind`; harmless if it is not routed."""

    async def send(
        self, peer_id: str, message: Message, priority: Priority = Priority.CONTROL
    ) -> None:
        """Queue `message` for `peer_id` (which may be this device: then no copy is made).

        Returns once the link's send budget has room for it. The parts must not change until they
        are on the wire: the sender gives them away.

        Raises:
            LinkClosed: there is no link to that device and none can be made now.
        """

    async def call(
        self,
        peer_id: str,
        message: Message,
        *,
        timeout_seconds: float,
        priority: Priority = Priority.CONTROL,
        reply_parts: PartsAllocator | None = None,
    ) -> Message:
        """Send `message` and wait for the handler's reply.

        Raises:
            LinkClosed: the device is out of reach, or its link ended before the reply.
            TimeoutError: no reply in time.
            Error: what the handler raised there.
        """

    def link_statistics(self, peer_id: str) -> LinkStatistics | None:
        """Counters of the link to `peer_id`, or None where there is none."""

    async def measure_link(self, peer_id: str, duration_seconds: float = 0.2) -> LinkSpeed:
        """Measure what this device can send to `peer_id` now. Raises as `call` does."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of a link, measured."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Totals since the link was made.

    Attributes:
        sent_bytes, received_bytes: on the wire, frames and headers included, TLS not.
        sent_parts_bytes: part bytes before compression.
    """

    sent_bytes: int
    received_bytes: int
    sent_parts_bytes: int


def display_name(mesh: Mesh, device: str) -> str:
    """A member's name; of who was never one, the beginning of its id."""
    member = mesh.members.get(device)
    return member.name if member is not None else device[:12]
