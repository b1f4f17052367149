"""What strangers can cost a listener: memory that is freed at once, and a bounded pace."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from p2ptrain.net.transport.dial import dial_unpaired
from p2ptrain.net.transport.listener import ListenerSettings
from p2ptrain.net.transport.pace import HELLO_LIMIT_BYTES, Rate
from p2ptrain.net.transport.pairing_channel import PairingChannel
from p2ptrain.net.transport.tls import unpaired_client_context
from p2ptrain.net.transport.tls_stream import HANDSHAKE_BYTES, TlsStream
from tests.support.links import make_device
from tests.unit.net.conftest import Caller, House

PLENTY = Rate(per_second=1e6, burst=1e6)
NO_PACE = ListenerSettings(
    connections_each=PLENTY, connections=PLENTY, handshakes_each=PLENTY, handshakes=PLENTY
)
CLIENT_HELLO_BEGINS = b"\x16\x03\x01"


def client_hello() -> bytes:
    """The first flight of a TLS client."""
    outgoing = ssl.MemoryBIO()
    tls = unpaired_client_context().wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HELLO = client_hello()


class Friends(House):
    """A device that has one friend."""

    def __init__(self, folder: Path, settings: ListenerSettings, *, knows: str = "") -> None:
        friend = make_device(folder, "friend")
        device = make_device(folder, "house")
        super().__init__(device, [friend.certificate_der], settings=settings, knows=knows)
        self.friend = Caller(friend)

    @property
    def address(self) -> tuple[str, int]:
        return self.listener.addresses[0]

    async def friend_connects(self) -> None:
        """Fails the test after a second."""
        async with asyncio.timeout(1.0):
            link = await self.friend.dial(self)
            await self.inbox.until(lambda _inbox: bool(self.links))
        for end in (link, *self.links):
            end.abort()
            await end.closed


@contextlib.asynccontextmanager
async def listening(house: Friends) -> AsyncIterator[Friends]:
    await house.listener.start(["127.0.0.1"])
    try:
        yield house
    finally:
        await house.listener.close()


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


async def knocks(house: Friends, said: bytes) -> None:
    """One stranger that says something and is gone."""
    reader, writer = await asyncio.open_connection(*house.address)
    writer.write(said)
    with contextlib.suppress(OSError):
        writer.write_eof()
        await reader.read()
    writer.close()


async def pairs_half(house: Friends) -> None:
    """One that ends the handshake, says something and is gone."""
    channel, _ = await dial_unpaired([house.address])
    await channel.send(b"hello")
    channel.close()
    await channel.closed


async def nobody_left(house: House) -> None:
    """Waits until the house has seen all their ends, which nobody tells of."""
    for _ in range(1000):
        await asyncio.sleep(0.01)
        if not house.listener.strangers:
            break
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("without_collector")
async def test_strangers_leave_nothing_though_no_garbage_is_collected(tmp_path: Path) -> None:
    """S16: whatever they say, nothing that they cost outlives their connection."""
    async with listening(Friends(tmp_path, NO_PACE)) as house:
        kinds = (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", HELLO[:50], HELLO, HELLO + bytes(99))
        before = {kind: alive(kind) for kind in (TlsStream, PairingChannel, asyncio.Timeout)}
        for number in range(500):
            await knocks(house, kinds[number % len(kinds)])
        await asyncio.gather(*(pairs_half(house) for _ in range(5)))
        await nobody_left(house)
        assert len(house.channels) >= 5
        house.channels.clear()
        assert {kind: alive(kind) for kind in before} == before


@pytest.mark.parametrize(
    "said",
    [
        b"\x15",
        b"GET / HTTP/1.1\r\n\r\n",
        CLIENT_HELLO_BEGINS + b"\x00\x00",
        CLIENT_HELLO_BEGINS + (HELLO_LIMIT_BYTES + 1).to_bytes(2),
        CLIENT_HELLO_BEGINS + b"\x00\x20\x02",
        b"\x16\x02\x01\x00\x20\x01",
    ],
)
async def test_noise_ends_at_once_and_costs_no_handshake(tmp_path: Path, said: bytes) -> None:
    """S5: nothing of TLS is begun for it."""
    async with listening(Friends(tmp_path, ListenerSettings())) as house:
        reader, writer = await asyncio.open_connection(*house.address)
        writer.write(said)
        async with asyncio.timeout(1.0):
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
        writer.close()


async def test_a_hello_may_come_in_pieces(tmp_path: Path) -> None:
    async with listening(Friends(tmp_path, ListenerSettings())) as house:
        reader, writer = await asyncio.open_connection(*house.address)
        for byte in HELLO:
            writer.write(bytes([byte]))
            await writer.drain()
        async with asyncio.timeout(1.0):
            assert await reader.read(1) == b"\x16"  # the server's turn
        writer.close()


async def test_a_handshake_without_end_is_cut(tmp_path: Path) -> None:
    """S15: 16 KiB is all that anybody may send before it is known who that is."""
    async with listening(Friends(tmp_path, ListenerSettings())) as house:
        reader, writer = await asyncio.open_connection(*house.address)
        writer.write(HELLO)
        await reader.read(1)
        # A record that says it is longer than it will ever be, again and again.
        writer.write((b"\x14\x03\x03\x00\x01\x01" * (HANDSHAKE_BYTES // 6 + 2))[:HANDSHAKE_BYTES])
        async with asyncio.timeout(1.0):
            with contextlib.suppress(OSError):
                while await reader.read(4096):
                    pass
        writer.close()


async def test_a_friend_gets_in_past_hundreds_of_half_handshakes(tmp_path: Path) -> None:
    """S16: from the same address, whose pace they have used up."""
    async with listening(Friends(tmp_path, ListenerSettings())) as house:
        sockets = []
        for number in range(150):
            stranger = socket.create_connection(house.address)
            if number % 2:
                stranger.sendall(HELLO)
            sockets.append(stranger)
            if not number % 10:
                await asyncio.sleep(0)
        await house.friend_connects()
        for stranger in sockets:
            stranger.close()


async def test_a_known_address_waits_for_no_flood_elsewhere(tmp_path: Path) -> None:
    used_up = ListenerSettings(
        connections=Rate(per_second=1e-6, burst=0.0), handshakes=Rate(per_second=1e-6, burst=0.0)
    )
    async with listening(Friends(tmp_path, used_up, knows="127.0.0.1")) as house:
        await house.friend_connects()
    async with listening(Friends(tmp_path, used_up)) as house:
        await knocks(house, HELLO)
        assert house.listener.strangers == 0


async def test_who_proves_to_be_a_friend_uses_up_no_pace(tmp_path: Path) -> None:
    once = Rate(per_second=1e-6, burst=1.0)
    settings = ListenerSettings(
        connections_each=once, connections=once, handshakes_each=once, handshakes=once
    )
    async with listening(Friends(tmp_path, settings)) as house:
        for _ in range(3):
            await house.friend_connects()
            house.links.clear()


async def test_of_those_who_wait_for_a_handshake_the_newest_goes_first(tmp_path: Path) -> None:
    slow = ListenerSettings(handshakes_each=Rate(per_second=10.0, burst=1.0))
    async with listening(Friends(tmp_path, slow)) as house:
        strangers = [await asyncio.open_connection(*house.address) for _ in range(4)]
        answered: list[int] = []

        async def answer(number: int, reader: asyncio.StreamReader) -> None:
            await reader.read(1)
            answered.append(number)

        asks = []
        for number, (reader, writer) in enumerate(strangers):
            writer.write(HELLO)
            asks.append(asyncio.create_task(answer(number, reader)))
            await asyncio.sleep(0.01)  # so that they come in this order
        await asyncio.gather(*asks)
        assert answered == [0, 3, 2, 1]
        for _, writer in strangers:
            writer.close()
