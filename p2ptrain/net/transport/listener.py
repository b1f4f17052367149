"""Accepts connections: paired devices become links, others may only try to pair.

Sockets are IPv4 and IPv6, on all addresses or on given ones, all at one port. Each connection is
accepted with the context of that moment, so a change of trust counts from the next connection on.

Until its certificate is known a connection costs us memory and a timer, and any host on the network
can open thousands. So strangers are few for one address and few in all, and the newest pushes out
the oldest: a flood of silent connections cannot lock out a paired device, which needs its place for
some milliseconds only. A stranger has HANDSHAKE_SECONDS, and two paces bound how many come and how
many handshakes are computed in a second. Strangers elsewhere never delay an address at which a
paired device was.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from p2ptrain.errors import OptionError, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import Address, StreamUser
from p2ptrain.net.transport.dial import MakeLink
from p2ptrain.net.transport.pace import (
    PER_ADDRESS_LIMIT,
    TOTAL_LIMIT,
    Admission,
    Pace,
    PaceQueue,
    Rate,
    first_record,
)
from p2ptrain.net.transport.pairing_channel import PairingChannel
from p2ptrain.net.transport.sockets import bind_all
from p2ptrain.net.transport.tls import certificate_id
from p2ptrain.net.transport.tls_stream import TlsStream

HANDSHAKE_SECONDS = 5.0

ACCEPT_RETRY_SECONDS = 0.5
"""Pause after `accept` failed, as it does at once again while no file descriptor is free."""

CONNECTIONS_EACH = Rate(per_second=50.0, burst=200.0)

CONNECTIONS = Rate(per_second=100.0, burst=400.0)

HANDSHAKES_EACH = Rate(per_second=8.0, burst=32.0)

HANDSHAKES = Rate(per_second=16.0, burst=64.0)
"""See `ListenerSettings`. Many devices may start at one address, each with a dial to all others."""

ACCEPTS_A_TURN = 32
"""Connections accepted before the event loop gets its turn."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Bounds on strangers.

    Attributes:
        handshake_seconds: until the TLS handshake is done, and then again for an unpaired device's
            talk (`PairingChannel.expire_after` prolongs that).
        per_address_limit, total_limit: unauthenticated connections at once.
        connections_each, connections: those taken from one address and from all; what is beyond
            is closed at once.
        handshakes_each, handshakes: computed for one address and for all; what is beyond waits.
    """

    handshake_seconds: float = HANDSHAKE_SECONDS
    per_address_limit: int = PER_ADDRESS_LIMIT
    total_limit: int = TOTAL_LIMIT
    connections_each: Rate = CONNECTIONS_EACH
    connections: Rate = CONNECTIONS
    handshakes_each: Rate = HANDSHAKES_EACH
    handshakes: Rate = HANDSHAKES


@dataclass(frozen=True, slots=True)
class ListenerHooks:
    """What a listener asks and reports. All are called on the event loop and must not block.

    Attributes:
        context: the `tls.server_context` to accept the next connection with.
        make_link: a link for the paired device of this id, not connected yet.
        on_unpaired: a device without a certificate wants to pair; None refuses them.
        is_known: whether a paired device was at this address. It still has to prove what it is.
    """

    context: Callable[[], ssl.SSLContext]
    make_link: MakeLink
    on_unpaired: Callable[[PairingChannel], None] | None = None
    is_known: Callable[[str], bool] = lambda _host: False


class Listener:
    """Listens from `start` to `close`; the links it has handed over live on after that."""

    def __init__(self, door: ListenerHooks, settings: ListenerSettings | None = None) -> None:
        self._door = door
        self._settings = chosen = settings or ListenerSettings()
        self._admission: Admission[asyncio.Timeout] = Admission(
            chosen.per_address_limit, chosen.total_limit
        )
        self._connections: Pace[str] = Pace(chosen.connections_each, chosen.connections)
        self._turns = PaceQueue(Pace(chosen.handshakes_each, chosen.handshakes))
        self._sockets: list[socket.socket] = []
        self._addresses: list[Address] = []
        self._port = 0
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}
        self._moved = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> list[Address]:
        """Where it listens, or did until `close`."""
        return list(self._addresses)

    @property
    def port(self) -> int:
        """The port, the same on every address."""
        return self._port

    @property
    def strangers(self) -> int:
        """How many unauthenticated connections there are now."""
        return len(self._admission)

    async def start(self, hosts: Sequence[str] | None = None, port: int = 0) -> None:
        """Listen on the addresses `hosts` (None: all, IPv4 and IPv6) at `port` (0: any free one).

        Raises:
            OptionError: the port or an address cannot be used.
        """
        self._listen_on(bind_all(hosts, port))
        self._port = self._addresses[0][1]
        self._serving = asyncio.create_task(self._serve(), name="listener")

    def move(self, hosts: Sequence[str]) -> None:
        """Listen on the addresses `hosts` from now on, at the same port; connections stay.

        Nothing happens before `start` and after `close`.

        Raises:
            OptionError: one of them cannot be used. It listens on the others.
        """
        here = dict(zip((host for host, _ in self._addresses), self._sockets, strict=True))
        if self._serving is None or self._serving.done() or list(here) == list(hosts):
            return
        problem: OptionError | None = None
        for host in hosts:
            try:
                here[host] = here[host] if host in here else bind_all([host], self._port)[0]
            except OptionError as error:
                problem = error
        self._listen_on([here[host] for host in hosts if host in here])
        if problem is not None:
            raise problem

    def _listen_on(self, sockets: list[socket.socket]) -> None:
        for unused in {*self._sockets} - {*sockets, *self._accepting}:
            unused.close()  # moved on before anything was accepted from it
        self._sockets = sockets
        self._addresses = [listening.getsockname()[:2] for listening in sockets]
        self._moved.set()

    async def close(self) -> None:
        """Stop listening and cut all strangers."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for listening in {*self._sockets, *self._accepting}:
            listening.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self._moved.wait()
                self._moved.clear()
                await self._follow(group)

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        """Accept from the sockets of now, and only from them."""
        for listening in [old for old in self._accepting if old not in self._sockets]:
            self._accepting[listening].cancel()
            await asyncio.wait([self._accepting[listening]])
            listening.close()  # not before: the event loop still watched it
            del self._accepting[listening]
        for listening in self._sockets:
            if listening not in self._accepting:
                accepting = group.create_task(self._accept_from(listening, group))
                self._accepting[listening] = accepting

    async def _accept_from(self, listening: socket.socket, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        in_a_row = 0
        while True:
            in_a_row = (in_a_row + 1) % ACCEPTS_A_TURN
            if not in_a_row:
                await asyncio.sleep(
                    0
                )  # accepting does not wait where a connection is there already
            try:
                connection, address = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue  # gone before its turn, as macOS says: others must not wait for that
            except OSError as error:
                _log.warning("accept failed", error=str(error))
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            host = str(address[0])
            known = self._door.is_known(host)
            if self._connections.take(host, loop.time(), exempt=known):
                group.create_task(self._greet(connection, host, known=known))
            else:
                connection.close()

    async def _greet(self, connection: socket.socket, host: str, *, known: bool) -> None:
        """See one connection through; a bug on its way must not end the listener."""
        try:
            await self._see_through(connection, host, known=known)
        except (PeerError, OSError) as error:  # TimeoutError included
            _log.debug("connection refused", host=host, error=str(error))
        except Exception:
            _log.exception("greeting a connection failed", host=host)

    async def _see_through(self, connection: socket.socket, host: str, *, known: bool) -> None:
        """Until it is authenticated or gone."""
        stream: TlsStream | None = None
        try:
            async with self._admitted(host) as patience:
                received = await first_record(connection)
                await self._turns.take(host, exempt=known)
                made = stream = self._stream(host, received)
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: made, connection)
                user = await stream.opened()
                if isinstance(user, PairingChannel):
                    patience.reschedule(None)  # it has a limit of its own
                    await user.closed
                else:
                    self._turns.give_back(host, exempt=known)
                    self._connections.give_back(host, exempt=known)
        finally:
            if stream is None:
                connection.close()
            elif not isinstance(stream.user, Link):
                stream.abort()

    @contextlib.asynccontextmanager
    async def _admitted(self, host: str) -> AsyncIterator[asyncio.Timeout]:
        """A stranger's place, for a limited time; it ends early where another needs it.

        Raises:
            TimeoutError: the time is over.
        """
        async with asyncio.timeout(self._settings.handshake_seconds) as patience:
            evicted = self._admission.admit(patience, host)
            if evicted is not None and not evicted.expired():
                evicted.reschedule(asyncio.get_running_loop().time())
            try:
                yield patience
            finally:
                self._admission.release(patience)

    def _stream(self, host: str, received: bytes) -> TlsStream:
        return TlsStream(
            self._door.context(),
            lambda certificate_der: self._choose(certificate_der, host),
            server_side=True,
            announce=self._announce,
            received=received,
        )

    def _choose(self, certificate_der: bytes | None, host: str) -> StreamUser:
        if certificate_der is not None:
            return self._door.make_link(certificate_id(certificate_der))
        channel = PairingChannel(host)
        if self._door.on_unpaired is None:
            raise PeerError("this device pairs with no device now")
        channel.expire_after(self._settings.handshake_seconds)
        return channel

    def _announce(self, user: StreamUser) -> None:
        if isinstance(user, PairingChannel) and self._door.on_unpaired is not None:
            self._door.on_unpaired(user)
