"""Dials a device that may be reachable at several addresses (RFC 8305, "happy eyeballs").

Addresses are tried in the order given, the next one STAGGER_SECONDS after the last or as soon as
one has failed; the first whose TLS handshake proves the expected certificate wins, the others are
cancelled. Under TLS 1.3 the handshake proves the server to us, not us to the server: only its
first answer shows that it accepts us.

The wait before the next try is exponential with jitter, so that devices that lost each other at
the same moment do not dial at the same moment again and again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Generic, TypeAlias, TypeVar

from p2ptrain.errors import LinkClosed, NotPaired, PeerError
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import Address
from p2ptrain.net.transport.pairing_channel import PairingChannel
from p2ptrain.net.transport.tls import certificate_id, unpaired_client_context
from p2ptrain.net.transport.tls_stream import TlsStream

STAGGER_SECONDS = 0.25

CONNECT_SECONDS = 5.0

MakeLink: TypeAlias = Callable[[str], Link]
"""peer id -> a link for it, not connected yet: `lambda peer_id: Link(peer_id, receiver, ...)`.
Messages may be delivered from then on, before the caller has the link in hand."""

User = TypeVar("User", Link, PairingChannel)


async def dial(
    addresses: Sequence[Address],
    context: ssl.SSLContext,
    expected_id: str,
    make_link: MakeLink,
    stagger_seconds: float = STAGGER_SECONDS,
) -> Link:
    """Connect to the device `expected_id`.

    Args:
        addresses: where it may be, the likeliest first.
        context: `tls.client_context` with its certificate pinned.
        expected_id: SHA-256 of its certificate.
        make_link: called once, for the first address that proves to be the device.
        stagger_seconds: head start of an address before the next.

    Raises:
        NotPaired: no answer came from that device, but one with another certificate.
        LinkClosed: no answer came.
    """

    def accept(certificate_der: bytes, host: str) -> Link:
        if certificate_id(certificate_der) != expected_id:
            raise NotPaired(f"the device at {host} is not {expected_id[:8]}")
        return make_link(expected_id)

    return await _Race(context, accept).run(addresses, stagger_seconds)


async def dial_unpaired(
    addresses: Sequence[Address], stagger_seconds: float = STAGGER_SECONDS
) -> tuple[PairingChannel, bytes]:
    """Connect to a device that we are not paired with.

    Returns:
        The channel, and the server's certificate in DER, which proves nothing yet.

    Raises:
        LinkClosed: no answer came.
    """

    def accept(certificate_der: bytes, host: str) -> PairingChannel:
        return PairingChannel(host, certificate_der)

    race = _Race(unpaired_client_context(), accept)
    channel = await race.run(addresses, stagger_seconds)
    assert channel.peer_certificate_der is not None  # a TLS server always shows one
    return channel, channel.peer_certificate_der


class _Race(Generic[User]):
    """Tries addresses side by side; `accept` is called until it has returned once."""

    def __init__(self, context: ssl.SSLContext, accept: Callable[[bytes, str], User]) -> None:
        self._context = context
        self._accept: Callable[[bytes, str], User] = accept
        self._winner: User | None = None
        self._errors: list[PeerError] = []

    async def run(self, addresses: Sequence[Address], stagger_seconds: float) -> User:
        waiting = deque(addresses)
        running: set[asyncio.Task[None]] = set()
        try:
            while self._winner is None and (waiting or running):
                if waiting:
                    running.add(asyncio.create_task(self._attempt(waiting.popleft())))
                timeout = stagger_seconds if waiting else None
                done, running = await asyncio.wait(
                    running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()  # raises what is a bug
        except BaseException:
            if self._winner is not None:
                self._winner.abort("given up while connecting")
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if self._winner is None:
            raise self._failure(addresses)
        return self._winner

    async def _attempt(self, address: Address) -> None:
        stream = TlsStream(
            self._context, lambda der: self._choose(der, address[0]), server_side=False
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: stream, *address)
                await stream.opened()
        except OSError as error:  # TimeoutError included
            self._errors.append(LinkClosed(f"{address[0]} port {address[1]}: {error or 'silent'}"))
        except PeerError as error:
            self._errors.append(error)
        finally:
            if stream.user is None:
                stream.abort()

    def _choose(self, certificate_der: bytes | None, host: str) -> User:
        if self._winner is not None or certificate_der is None:
            raise LinkClosed(f"{host} is not needed: another address was faster")
        self._winner = self._accept(certificate_der, host)
        return self._winner

    def _failure(self, addresses: Sequence[Address]) -> PeerError:
        for error in self._errors:
            if isinstance(error, NotPaired):
                return error
        if not addresses:
            return LinkClosed("no address of the device is known")
        reasons = "; ".join(str(error) for error in self._errors)
        return LinkClosed(f"the device cannot be reached: {reasons}")


FIRST_SECONDS = 0.2

MAX_SECONDS = 10.0


class Backoff:
    """The pauses between the tries to reach one device."""

    def __init__(
        self, rng: Random, first_seconds: float = FIRST_SECONDS, most_seconds: float = MAX_SECONDS
    ) -> None:
        self._rng = rng
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._failures = 0

    def reset(self) -> None:
        """There is fresh reason to believe that the next try works."""
        self._failures = 0

    def next_seconds(self) -> float:
        """The pause after one more failure: half fixed, half random."""
        longest = min(self._first_seconds * 2.0**self._failures, self._most_seconds)
        self._failures = min(self._failures + 1, 32)
        return longest * self._rng.uniform(0.5, 1.0)
