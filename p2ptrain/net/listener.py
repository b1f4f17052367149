"""Accepting connections: paired devices become links, others may only try to pair.

Each connection is accepted with the context of that moment, so a change of trust counts from the
next connection on. A stranger has HANDSHAKE_SECONDS, and `admission.py` bounds how many there are.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2ptrain.errors import OptionError, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.net.admission import PER_ADDRESS_LIMIT, TOTAL_LIMIT, Admission
from p2ptrain.net.binding import bind_all
from p2ptrain.net.dial import Address, MakeLink
from p2ptrain.net.link import Link
from p2ptrain.net.pairing_channel import PairingChannel
from p2ptrain.net.stream import StreamUser
from p2ptrain.net.tls import certificate_id
from p2ptrain.net.tls_stream import TlsStream

HANDSHAKE_SECONDS = 5.0
ACCEPT_RETRY_SECONDS = 0.5
"""Pause after `accept` failed, as it does at once again while no file descriptor is free."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Bounds on strangers.

    Attributes:
        handshake_seconds: for the TLS handshake, and then again for an unpaired device's talk
            (`PairingChannel.expire_after` prolongs that).
        per_address_limit, total_limit: unauthenticated connections at once.
    """

    handshake_seconds: float = HANDSHAKE_SECONDS
    per_address_limit: int = PER_ADDRESS_LIMIT
    total_limit: int = TOTAL_LIMIT


@dataclass(frozen=True, slots=True)
class Door:
    """What a listener asks and tells. All are called on the event loop and must not block.

    Attributes:
        context: the `tls.server_context` to accept the next connection with.
        make_link: a link for the paired device of this id, not connected yet.
        on_link: the link is connected; called before any of its messages is delivered.
        on_unpaired: a device without a certificate wants to pair; None refuses them.
    """

    context: Callable[[], ssl.SSLContext]
    make_link: MakeLink
    on_link: Callable[[Link], None]
    on_unpaired: Callable[[PairingChannel], None] | None = None


class Listener:
    """Listens from `start` to `close`; the links it has handed over live on after that."""

    def __init__(self, door: Door, settings: ListenerSettings | None = None) -> None:
        self._door = door
        self._settings = settings or ListenerSettings()
        self._admission: Admission[TlsStream] = Admission(
            self._settings.per_address_limit, self._settings.total_limit
        )
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
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue  # gone before its turn, as macOS says: others must not wait for that
            except OSError as error:
                _log.warning("accept failed", error=str(error))
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            group.create_task(self._greet(connection, str(address[0])))

    async def _greet(self, connection: socket.socket, host: str) -> None:
        """See one connection through; a bug on its way must not end the listener."""
        try:
            await self._see_through(connection, host)
        except (PeerError, OSError) as error:  # TimeoutError included
            _log.debug("connection refused", host=host, error=str(error))
        except Exception:
            connection.close()
            _log.exception("greeting a connection failed", host=host)

    async def _see_through(self, connection: socket.socket, host: str) -> None:
        """Until it is authenticated or gone."""
        stream = TlsStream(
            self._door.context(),
            lambda certificate_der: self._choose(certificate_der, host),
            server_side=True,
            announce=self._announce,
        )
        evicted = self._admission.admit(stream, host)
        if evicted is not None:
            evicted.abort()
        try:
            user = await self._handshake(stream, connection)
            if isinstance(user, PairingChannel):
                await user.closed
        finally:
            self._admission.release(stream)
            if not isinstance(stream.user, Link):
                stream.abort()

    async def _handshake(self, stream: TlsStream, connection: socket.socket) -> StreamUser:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._settings.handshake_seconds):
            await loop.connect_accepted_socket(lambda: stream, connection)
            return await stream.handshake

    def _choose(self, certificate_der: bytes | None, host: str) -> StreamUser:
        if certificate_der is not None:
            return self._door.make_link(certificate_id(certificate_der))
        channel = PairingChannel(host)
        if self._door.on_unpaired is None:
            raise PeerError("this device takes no unpaired connections now")
        channel.expire_after(self._settings.handshake_seconds)
        return channel

    def _announce(self, user: StreamUser) -> None:
        if isinstance(user, Link):
            self._door.on_link(user)
        elif isinstance(user, PairingChannel) and self._door.on_unpaired is not None:
            self._door.on_unpaired(user)
