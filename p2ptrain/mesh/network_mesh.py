"""The household over a real network: joins identity, trust, discovery, links and the pure cores.

discovery ──hints──> connections ──links──> router <── the rooms above
    │                    │ up, lost
    └──> pairing ──> trust ──> contexts        membership driver (membership, election)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from types import MappingProxyType, TracebackType
from typing import Self

from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import LinkClosed, OptionError, UserError
from p2ptrain.events import Event, Ready
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.config import DEFAULT_PORT, MeshConfig, parse_peer
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice, DiscoveredDevices
from p2ptrain.mesh.discovery.interfaces import machine_addresses, without_scope
from p2ptrain.mesh.discovery.mdns import Discovery, NoDiscovery
from p2ptrain.mesh.discovery.roaming import (
    LocalAddresses,
    StaticPeers,
    follow_addresses,
    over_mdns,
)
from p2ptrain.mesh.election.election import Election
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.household_trust import HouseholdParts, HouseholdTrust, household_ids
from p2ptrain.mesh.identity.device_record import DeviceRecord, DiskWriter, default_name
from p2ptrain.mesh.identity.identity import IDENTITY_FILE, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.identity_conflicts import IdentityClash, NameKeeper
from p2ptrain.mesh.interface import (
    LinkLost,
    LinkSpeed,
    LinkStatistics,
    LinkUp,
    MemberChanged,
    MemberState,
    MeshCoordinator,
    MeshEvent,
    MeshMember,
)
from p2ptrain.mesh.links import link_probe
from p2ptrain.mesh.links.connections import Connections
from p2ptrain.mesh.links.hello import REFUSED_KIND, Hello, new_token
from p2ptrain.mesh.links.router import Router
from p2ptrain.mesh.membership.core_events import MemberRecord, PeerLinkLost, PeerLinkUp, SelfChanged
from p2ptrain.mesh.membership.membership import Membership
from p2ptrain.mesh.membership_driver import ELECTION_KIND, MEMBERSHIP_KIND, MembershipDriver
from p2ptrain.mesh.notifications import EventSubscribers, WarnOnce
from p2ptrain.mesh.trust.pairing_window import KnownCodes, normalised_code
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.mesh.trust_exchange import TRUST_KIND
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import Address
from p2ptrain.net.message import Message, Priority
from p2ptrain.net.transport.dial import dial
from p2ptrain.net.transport.listener import Listener, ListenerHooks


class NetworkMesh:
    """One device of a real household; see `Mesh` for what the shared methods promise.

    `async with` joins and, at its end, leaves. An error that means that this device cannot go on
    (a copied identity) cancels the body and is raised at its end.

    Attributes:
        household_trust: who is trusted, and the user's commands about it, from `async with` on.
        connections: links to other members, from `async with` on.
        membership_driver: who is here and who coordinates, from `async with` on.
    """

    def __init__(
        self,
        config: MeshConfig,
        emit: Callable[[Event], None],
        discovery: Discovery | None = None,
    ) -> None:
        """Load what the state folder holds; nothing is sent before `async with`.

        Args:
            config: this device's choices.
            emit: takes events for the user, never blocks.
            discovery: another way than the network's multicast.

        Raises:
            OptionError: an option cannot be used.
            UserError: the state folder cannot be used.
        """
        self._config = config
        self._own = LocalAddresses(config.interfaces)
        self._given_peers = [parse_peer(peer) for peer in config.peers]
        self._code = normalised_code(config.code) if config.code is not None else None
        folder = StateFolder(config.state_dir)
        self._is_new = not (folder.path / IDENTITY_FILE).exists()
        self._identity = load_or_create(folder)
        self._codes = KnownCodes(folder, self._identity.id)
        self._trust = TrustStore(folder, self._identity)
        self._file = DeviceRecord(folder, config.name, default_name(self._identity.id))
        self._instance = new_token()
        self._info = dict(config.info)
        self._watchers = EventSubscribers(self.self_id, emit)
        self._notices = WarnOnce(emit, self._trust.name)
        self._candidates = DiscoveredDevices(self._trust.is_trusted)
        self._tasks = TaskScope()
        self._writer = DiskWriter(self._tasks, self._notices)
        self._guard = Guard(
            self._trust, self._notices, lambda device_id: self.household_trust.end_links(device_id)
        )
        self._left = True  # until it has begun
        self._discovery = discovery or self._own_discovery()
        self.router = Router(
            self._file.name,
            self.send,
            lambda peer_id: self.connections.resume(peer_id),
            self._guard.note,
        )
        self.subscribe = self._watchers.subscribe
        self.route = self.router.route
        self.route_now = self.router.route_now
        self.unroute = self.router.unroute
        self.call = self.router.call

    # Joining and leaving

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.leave()
        finally:
            await self._tasks.__aexit__(error_type, error, trace)

    async def leave(self) -> None:
        """Tell all that this device leaves, then end everything. Harmless when repeated."""
        if self._left:
            return
        self._left = True
        if self.connections.is_copy:
            self.membership_driver.stop()  # what it would say might be of the other process
        else:
            self.membership_driver.leave()
        await asyncio.gather(self._discovery.close(), self.connections.close())
        await self._listener.close()
        await self._writer.close()
        await self.router.close()

    async def _start(self) -> None:
        self._started = asyncio.get_running_loop().time()
        self._make_parts()
        self._route_own_kinds()
        await self._listen()
        for device_id, addresses in self._file.addresses().items():
            if self._trust.is_trusted(device_id):
                self.connections.keep(device_id, addresses)
        await self._discovery.start(self.self_id, self.port, self._on_found)
        self._notices.emit(Ready(self.name, self.self_id, self.address, self.port))
        if self._is_new and self._trust.trusted:
            self._notices.warn(
                f"{IDENTITY_FILE} was not in the state folder: this device has a new identity "
                "now, and has to be paired again"
            )
        self.membership_driver.start()
        self.household_trust.start(self._code, self._config.window)
        self._follow_the_network()

    def _follow_the_network(self) -> None:
        given = StaticPeers(
            self._given_peers, self.household_trust.give, self._is_device_missing, self._notices
        )
        self._tasks.spawn(given.run(), "look up --peer")
        if self._config.interfaces:
            following = follow_addresses(self._own, self._listener.move, self._notices.warn)
            self._tasks.spawn(following, "listen where --interface leads")

    def _is_device_missing(self) -> bool:
        trusted = self._trust.trusted.keys()
        return not trusted or not trusted <= self.connected

    def _make_parts(self) -> None:
        config, rng = self._config, Random()
        self.connections = Connections(
            self.self_id,
            self.router,
            self._guard,
            self._notices,
            self._tasks,
            rng,
            own_hello=self._hello,
            dial=self._dial,
            on_up=self._on_up,
            on_lost=self._on_lost,
            on_replaced=lambda peer_id: self._notify(LinkLost(peer_id, "another one replaced it")),
            on_not_paired=lambda peer_id: self.household_trust.refused_us(peer_id),
            on_copied=lambda peer_id, where: self._copies.suspected(peer_id, where),
            times=config.times,
        )
        self._copies = IdentityClash(
            self.self_id,
            self.connections,
            self._tasks,
            lambda peer_id: self._guard.note(peer_id, Offence.COPIES),
        )
        me = MemberRecord(self.self_id, self.name, info=self._info, instance=self._instance)
        self.membership_driver = MembershipDriver(
            self.self_id,
            Membership(me, config.membership, rng, household_ids(self._trust, self.self_id)),
            Election(self.self_id, config.election, rng, term_floor=self._file.term),
            self.connections,
            self._guard,
            self._notify,
            self._keep_term,
        )
        self._names = NameKeeper(
            self._file,
            self._trust,
            self.connections,
            self.membership_driver,
            self._notices,
            self._writer,
        )
        parts = HouseholdParts(
            identity=self._identity,
            file=self._file,
            codes=self._codes,
            trust=self._trust,
            candidates=self._candidates,
            connections=self.connections,
            membership_driver=self.membership_driver,
            notices=self._notices,
            guard=self._guard,
            tasks=self._tasks,
        )
        self.household_trust = HouseholdTrust(parts, rng)
        door = ListenerHooks(
            context=self._trust.server_context,
            make_link=self.connections.incoming,
            on_unpaired=self.household_trust.serve,
            is_known=self._is_known,
        )
        self._listener = Listener(door)
        self._left = False

    def _route_own_kinds(self) -> None:
        link_probe.ProbeReceiver().install(self)
        for kind in (MEMBERSHIP_KIND, ELECTION_KIND):
            self.route_now(kind, self.membership_driver.take)
        self.route(TRUST_KIND, self.household_trust.exchange.take)
        self.route(REFUSED_KIND, self._copies.refused)

    async def _listen(self) -> None:
        hosts = self._own.ips if self._config.interfaces else None
        wanted = self._config.port
        try:
            await self._listener.start(hosts, DEFAULT_PORT if wanted is None else wanted)
        except OptionError:
            if wanted is not None:
                raise
            await self._listener.start(hosts, 0)

    # What `Mesh` promises

    @property
    def self_id(self) -> str:
        return self._identity.id

    @property
    def name(self) -> str:
        return self._file.name

    @property
    def port(self) -> int:
        """Where this device listens."""
        return self._listener.port

    @property
    def address(self) -> str:
        """The IP that is shown to users; the device may have others."""
        return self._own.shown

    @property
    def members(self) -> Mapping[str, MeshMember]:
        return MappingProxyType(self.membership_driver.members)

    @property
    def connected(self) -> frozenset[str]:
        return frozenset(self.connections.connected())

    @property
    def coordinator(self) -> MeshCoordinator | None:
        return self.membership_driver.coordinator

    def distrust(self, device_id: str, seconds: float) -> None:
        self.membership_driver.distrust(device_id, seconds)

    def describe(self, info: Mapping[str, int | float | str]) -> None:
        """This device says something else of itself; the others learn it."""
        if dict(info) != self._info:
            self._info = dict(info)
            if not self._left:
                self.membership_driver.handle(SelfChanged(info=self._info))

    async def send(
        self, peer_id: str, message: Message, priority: Priority = Priority.CONTROL
    ) -> None:
        if self._left:
            raise LinkClosed("this device has left the household")
        if peer_id == self.self_id:
            await self.router.deliver(peer_id, message)
            return
        link = self.connections.link(peer_id)
        if link is None:
            raise LinkClosed(f"there is no link to {self._trust.name(peer_id)} now")
        await link.link.send(message, priority)

    def link_statistics(self, peer_id: str) -> LinkStatistics | None:
        link = self.connections.link(peer_id)
        return link.statistics() if link is not None else None

    async def measure_link(self, peer_id: str, duration_seconds: float = 0.2) -> LinkSpeed:
        return await link_probe.measure_link(self, peer_id, duration_seconds)

    def path(self, peer_id: str) -> Mapping[str, str]:
        """Where the link to a device goes: its `address`, our `interface`; empty without a link."""
        ends = self.connections.ends(peer_id)
        if ends is None:
            return {}
        own, peer = map(without_scope, ends)
        named = [a.interface for a in machine_addresses() if without_scope(a.ip) == own]
        return {"address": peer, "interface": named[0] if named else "unknown"}

    # What the parts tell

    def _on_found(self, candidate: DiscoveredDevice) -> None:
        if candidate.id == self.self_id:
            if not self._left:
                self._copies.heard(candidate, self._own.ips, self.port)
        elif self._candidates.put(candidate):
            self.connections.hint(candidate.id, candidate.addresses)
            self.household_trust.found()

    def _on_up(self, peer_id: str, hello: Hello) -> None:
        self._writer.soon(
            partial(self._file.save_addresses, self._proven_addresses()),
            "after its next start this device may take longer to find others",
        )
        self.membership_driver.handle(PeerLinkUp(peer_id))
        self.household_trust.link_up(peer_id)
        self._names.heard(peer_id, self.self_id, hello.name)
        self._notify(LinkUp(peer_id))

    def _on_lost(self, peer_id: str, refused: bool) -> None:
        self.membership_driver.handle(PeerLinkLost(peer_id, refused))
        self._notify(LinkLost(peer_id, "it refuses connections" if refused else "it broke"))

    def _notify(self, event: MeshEvent) -> None:
        self._watchers.notify(event)
        if isinstance(event, MemberChanged) and event.member.state is MemberState.SUSPECT:
            self.connections.look_elsewhere(event.member.id)
        if isinstance(event, MemberChanged) and event.member.id != self.self_id:
            self._names.heard(event.member.id, self.self_id, event.member.name)

    # Small things

    def _own_discovery(self) -> Discovery:
        if not self._config.discovery:
            return NoDiscovery()
        return over_mdns(self._own, lambda: self._trust.trusted, self._notices.warn)

    def _hello(self) -> Hello:
        self._own.refresh()  # the link that it is for may be the first one over a new network
        return Hello(
            name=self.name,
            instance=self._instance,
            uptime_seconds=asyncio.get_running_loop().time() - self._started,
            port=self.port,
            addresses=tuple(self._own.published[:8]),
            info=self._info,
        )

    async def _dial(
        self, addresses: Sequence[Address], peer_id: str, make_link: Callable[[str], Link]
    ) -> Link:
        return await dial(addresses, self._trust.client_context(), peer_id, make_link)

    def _is_known(self, host: str) -> bool:
        """Whether a trusted device was at this address when it last proved itself."""
        books = (self.connections.addresses(peer_id) for peer_id in self._trust.trusted)
        return any(host == ip for book in books for ip, _ in book.proven)

    def _proven_addresses(self) -> dict[str, list[Address]]:
        proven = {key: self.connections.addresses(key).proven for key in self._trust.trusted}
        return {key: found for key, found in proven.items() if found}

    def _keep_term(self, term: int) -> None:
        """On disk before any device receives it; a full disk is not worth a membership, or a job.

        Another process of this device would have to begin while that election is under way, on a
        disk that has room again, to vote twice in one term; commands are fenced all the same.
        """
        try:
            self._file.keep_term(term)
        except UserError as error:
            self._notices.warn(
                f"{error}: this device continues, but free some disk space before its next start"
            )
