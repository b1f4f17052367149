"""Who may connect, and what a stranger can cost. Over TLS on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2ptrain.errors import LinkClosed, NotPaired, OptionError, PeerError
from p2ptrain.net.link.link import Link
from p2ptrain.net.message import Message
from p2ptrain.net.transport.dial import dial, dial_unpaired
from p2ptrain.net.transport.listener import Listener, ListenerHooks, ListenerSettings
from p2ptrain.net.transport.tls import client_context
from tests.support.links import Device, Inbox, make_device
from tests.unit.net.conftest import Caller, House


@pytest.fixture
async def house(left_device: Device, right_device: Device) -> AsyncIterator[House]:
    """Device "right", paired with "left"."""
    made = House(right_device, [left_device.certificate_der])
    await made.listener.start(["127.0.0.1"])
    yield made
    await made.listener.close()
    for link in made.links:
        link.abort()
        await link.closed


@pytest.fixture
async def caller(left_device: Device) -> Caller:
    return Caller(left_device)


async def refused(caller: Caller, house: House) -> PeerError:
    """How a caller learns that it is not let in: while dialling, or from its link's end."""
    try:
        await caller.dial(house)
    except PeerError as error:
        return error
    return await caller.inbox.loss()


@pytest.mark.parametrize("year", [1960, 2090])
async def test_a_clock_that_is_wrong_by_decades_keeps_no_device_out(
    tmp_path: Path, year: int
) -> None:
    """What a certificate says of its time is nothing to the one that has pinned it."""
    desk, shelf = make_device(tmp_path, "desk", year), make_device(tmp_path, "shelf", year)
    house = House(desk, [shelf.certificate_der])
    await house.listener.start(["127.0.0.1"])
    link = await Caller(shelf).dial(house)
    await house.inbox.until(lambda inbox: bool(house.links))
    for end in (link, *house.links):
        end.abort()
        await end.closed
    await house.listener.close()


async def test_a_message_in_the_first_flight_finds_its_link(house: House, caller: Caller) -> None:
    link = await caller.dial(house)
    await link.send(Message("hello"))
    await house.inbox.count(1)
    assert house.links[0].peer_id == caller.device.id
    assert house.listener.strangers == 0
    link.abort()
    await link.closed


async def test_an_unknown_device_is_refused(house: House, stranger: Device) -> None:
    """S2: nor does it believe that it is connected."""
    assert isinstance(await refused(Caller(stranger), house), NotPaired)
    assert not house.links
    assert not house.channels


async def test_a_certificate_signed_by_a_paired_device_is_refused(
    house: House, left_device: Device, tmp_path: Path
) -> None:
    """S3: with its chain appended."""
    child = Caller(signed_by(left_device, tmp_path))
    assert isinstance(await refused(child, house), PeerError)
    assert house.links == []


async def test_what_openssl_does_not_take_for_a_certificate_keeps_no_other_device_out(
    house: House, caller: Caller
) -> None:
    house.pinned[:0] = [b"", b"no certificate at all"]
    link = await caller.dial(house)
    await link.send(Message("hello"))
    await house.inbox.count(1)
    link.abort()
    await link.closed


async def test_the_dialled_device_must_be_the_expected_one(
    house: House, caller: Caller, stranger: Device
) -> None:
    with pytest.raises(NotPaired):
        await caller.dial(house, expected=stranger)


async def test_a_pinned_certificate_of_another_id_is_refused(house: House, caller: Caller) -> None:
    both = [house.device.certificate_der, caller.device.certificate_der]
    with pytest.raises(NotPaired, match="is not"):
        await dial(
            house.listener.addresses,
            client_context(caller.device.pem_file, both),
            caller.device.id,  # pinned, but somebody else answers
            lambda peer_id: Link(peer_id, caller.inbox),
        )


async def test_a_change_of_trust_counts_from_the_next_connection(
    house: House, caller: Caller
) -> None:
    """S4: contexts are made again."""
    link = await caller.dial(house)
    await link.send(Message("hello"))
    await house.inbox.count(1)
    house.pinned.clear()
    again = Caller(caller.device)
    assert isinstance(await refused(again, house), NotPaired)
    assert link.is_open
    link.abort()
    await link.closed


async def test_no_ticket_is_given_and_tls_is_1_3(house: House, caller: Caller) -> None:
    """S4: nothing could be resumed."""
    context = client_context(caller.device.pem_file, [house.device.certificate_der])
    reader, writer = await asyncio.open_connection(
        *house.listener.addresses[0], ssl=context, server_hostname=""
    )
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    await house.inbox.until(lambda inbox: bool(house.links))
    assert tls.version() == "TLSv1.3"
    assert tls.session is None or not tls.session.has_ticket
    house.links[0].abort()
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()


async def test_no_device_gets_in_with_a_certificate_of_the_same_name(
    house: House, caller: Caller, tmp_path: Path
) -> None:
    """S2: the key counts, however often it is tried."""
    impostor = Caller(make_device(tmp_path, "left", year=2021))
    assert impostor.device.id != caller.device.id
    for _ in range(20):
        assert isinstance(await refused(impostor, house), PeerError)
        impostor.inbox.losses.clear()
    assert house.links == []
    assert house.channels == []


async def test_nothing_can_be_read_on_the_way(house: House, caller: Caller) -> None:
    """S20: neither what is sent nor what it is called."""
    seen = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*house.listener.addresses[0])
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    context = client_context(caller.device.pem_file, [house.device.certificate_der])
    async with await asyncio.start_server(tap, "127.0.0.1", 0) as server:
        tapped = [server.sockets[0].getsockname()[:2]]
        link = await dial(tapped, context, house.device.id, lambda peer: Link(peer, caller.inbox))
        said = memoryview(b"the text that is trained on " * 1000)
        await link.send(Message("a.secret.kind", {"model": "secret model"}, (said,)))
        await house.inbox.count(1)
        link.abort()
        await link.closed
    assert len(seen) > len(said)
    for secret in (b"the text that", b"secret", house.device.certificate_der[:40]):
        assert secret not in seen


@pytest.mark.parametrize("ciphers", ["DEFAULT", "ALL:@SECLEVEL=0"])
async def test_older_tls_is_refused(house: House, ciphers: str) -> None:
    """S5: weak ciphers or not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers(ciphers)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, OSError)):
        await asyncio.open_connection(*house.listener.addresses[0], ssl=context, server_hostname="")
    assert not house.links
    assert not house.channels


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", bytes(300), b"\x16\x03\x01\xff\xff"])
async def test_noise_is_cut_quietly(
    house: House, noise: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """S5: without a traceback in the log."""
    reader, writer = await asyncio.open_connection(*house.listener.addresses[0])
    writer.write(noise)
    writer.write_eof()
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()
    assert not house.links
    assert not house.channels
    assert "Traceback" not in caplog.text


async def test_silent_strangers_are_cut_and_cannot_lock_a_friend_out(
    left_device: Device, right_device: Device
) -> None:
    """S16: the oldest give way."""
    settings = ListenerSettings(per_address_limit=4, total_limit=6)
    house = House(right_device, [left_device.certificate_der], settings=settings)
    await house.listener.start(["127.0.0.1"])
    connections = [await asyncio.open_connection(*house.listener.addresses[0]) for _ in range(12)]
    caller = Caller(left_device)
    link = await caller.dial(house)
    await link.send(Message("hello"))
    await house.inbox.count(1)
    assert house.listener.strangers <= 4
    for reader, _ in connections[:8]:  # the oldest gave way
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
    link.abort()
    await house.listener.close()
    assert house.listener.strangers == 0
    for _, writer in connections:
        writer.close()
    await house.links[0].closed


async def test_a_silent_stranger_has_little_time(right_device: Device) -> None:
    """S16: a silent stranger has little time."""
    house = House(right_device, [], settings=ListenerSettings(handshake_seconds=0.02))
    await house.listener.start(["127.0.0.1"])
    reader, writer = await asyncio.open_connection(*house.listener.addresses[0])
    with contextlib.suppress(OSError):
        assert await reader.read() == b""
    writer.close()
    await house.listener.close()


async def test_a_slow_pairing_is_cut(right_device: Device) -> None:
    """S16: after the handshake too."""
    house = House(right_device, [], settings=ListenerSettings(handshake_seconds=0.05))
    await house.listener.start(["127.0.0.1"])
    channel, _ = await dial_unpaired(house.listener.addresses)
    with pytest.raises(LinkClosed):
        await channel.receive()
    await house.listener.close()


async def test_connections_that_were_cut_before_their_turn_hold_up_no_device(
    caller: Caller, right_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger can cut as many as it likes; each made the listener pause."""
    loop = asyncio.get_running_loop()
    accept, cut = loop.sock_accept, iter(range(100))

    async def sock_accept(listening: socket.socket) -> Any:
        if next(cut, None) is not None:
            raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    house = House(right_device, [caller.device.certificate_der])
    await house.listener.start(["127.0.0.1"])
    async with asyncio.timeout(10):
        link = await caller.dial(house)
    link.abort()
    await link.closed
    await house.listener.close()
    for link in house.links:
        await link.closed


async def test_a_bug_while_greeting_does_not_end_the_listener(house: House, caller: Caller) -> None:
    house.contexts_fail = True
    assert isinstance(await refused(Caller(caller.device), house), PeerError)
    house.contexts_fail = False
    link = await caller.dial(house)
    assert link.is_open
    link.abort()
    await link.closed


async def test_pairing_messages_pass_both_ways(house: House) -> None:
    channel, certificate_der = await dial_unpaired(house.listener.addresses)
    assert certificate_der == house.device.certificate_der
    theirs = await house.channel()
    assert house.listener.strangers == 1
    for content in (b"", b"x", bytes(4096)):
        await channel.send(content)
        assert await theirs.receive() == content
        await theirs.send(content)
    assert [await channel.receive() for _ in range(2)] == [b"", b"x"]
    await theirs.send(b"last")
    theirs.close()
    assert await channel.receive() == bytes(4096)
    assert await channel.receive() == b"last"
    with pytest.raises(LinkClosed):
        await channel.receive()
    with pytest.raises(LinkClosed):
        await channel.send(b"too late")
    await channel.closed


async def test_unpaired_devices_may_be_refused(left_device: Device, right_device: Device) -> None:
    house = House(right_device, [left_device.certificate_der])
    house.listener = Listener(ListenerHooks(house.context, house.make_link))
    await house.listener.start(["127.0.0.1"])
    channel, _ = await dial_unpaired(house.listener.addresses)
    with pytest.raises(PeerError):
        await channel.receive()
    await channel.closed
    await house.listener.close()


async def test_the_first_address_that_answers_wins(house: House, caller: Caller) -> None:
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # accepts in the kernel, never speaks
        closed.bind(("127.0.0.1", 0))
        addresses = [closed.getsockname(), silent.getsockname(), *house.listener.addresses * 3]
        made: list[Link] = []

        def make_link(peer_id: str) -> Link:
            made.append(Link(peer_id, caller.inbox))
            return made[-1]

        context = client_context(caller.device.pem_file, [house.device.certificate_der])
        link = await dial(addresses, context, house.device.id, make_link, stagger_seconds=0.0)
    assert made == [link]
    assert link.is_open
    link.abort()
    await link.closed
    assert len(caller.inbox.losses) == 1


async def test_no_process_listens(caller: Caller, right_device: Device) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        context = client_context(caller.device.pem_file, [right_device.certificate_der])
        for addresses in ([closed.getsockname()] * 2, []):
            with pytest.raises(LinkClosed):
                await dial(
                    addresses, context, right_device.id, lambda peer_id: Link(peer_id, Inbox())
                )


async def test_giving_up_while_dialling_leaves_nothing(right_device: Device) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        task = asyncio.create_task(dial_unpaired([silent.getsockname()] * 3, 0.0))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_listens_on_both_protocols_at_one_port(
    left_device: Device, right_device: Device
) -> None:
    house = House(right_device, [left_device.certificate_der])
    await house.listener.start(["127.0.0.1", "::1"])
    hosts = [address[0] for address in house.listener.addresses]
    assert hosts == ["127.0.0.1", "::1"]
    for host in hosts:
        channel, _ = await dial_unpaired([(host, house.listener.port)])
        channel.close()
        await channel.closed
    await house.listener.close()


async def test_a_taken_port_is_the_users_to_change(house: House, right_device: Device) -> None:
    other = House(right_device, [])
    with pytest.raises(OptionError, match=str(house.listener.port)):
        await other.listener.start(["127.0.0.1"], house.listener.port)
    with pytest.raises(OptionError):
        await other.listener.start(["not an address"])


def signed_by(parent: Device, folder: Path) -> Device:
    """A device whose certificate was made with a paired device's key."""
    parent_key = serialization.load_pem_private_key(parent.pem_file.read_bytes(), password=None)
    assert isinstance(parent_key, ec.EllipticCurvePrivateKey)
    parent_certificate = x509.load_der_x509_certificate(parent.certificate_der)
    child = make_device(folder, "child")
    child_key = serialization.load_pem_private_key(child.pem_file.read_bytes(), password=None)
    assert isinstance(child_key, ec.EllipticCurvePrivateKey)
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "child")]))
        .issuer_name(parent_certificate.subject)
        .public_key(child_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=365 * 50))
        .sign(parent_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    chain = certificate.public_bytes(pem) + parent_certificate.public_bytes(pem)
    child.pem_file.write_bytes(chain + child_key.private_bytes(pem, *plain))
    return Device(child.pem_file, certificate.public_bytes(serialization.Encoding.DER))


async def test_where_it_listened_is_known_after_its_end(house: House) -> None:
    """A device that leaves still speaks of its port where a peer comes back at that moment."""
    before = house.listener.addresses
    await house.listener.close()
    assert house.listener.addresses == before
    assert house.listener.port == before[0][1] > 0


async def reaches(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        channel, _ = await dial_unpaired([(host, port)])
    except LinkClosed:
        return False
    channel.close()
    await channel.closed
    return True


async def test_listening_moves_to_another_address_at_the_same_port(house: House) -> None:
    port = house.listener.port
    house.listener.move(["::1"])
    assert house.listener.addresses == [("::1", port)]
    assert await reaches("::1", port)
    assert not await reaches("127.0.0.1", port)
    house.listener.move(["127.0.0.1", "::1"])
    assert await reaches("127.0.0.1", port)
    assert await reaches("::1", port)


async def test_an_address_that_is_gone_at_once_is_free_again(house: House) -> None:
    port = house.listener.port
    house.listener.move(["127.0.0.1", "::1"])
    house.listener.move(["127.0.0.1"])
    assert not await reaches("::1", port)
    house.listener.move(["127.0.0.1", "::1"])
    assert await reaches("::1", port)


async def test_links_outlive_the_address_at_which_they_came(house: House, caller: Caller) -> None:
    link = await caller.dial(house)
    house.listener.move(["::1"])
    assert await reaches("::1", house.listener.port)
    await link.send(Message("still.here"))
    await house.inbox.count(1)
    link.abort()
    await link.closed


async def test_an_address_that_cannot_be_used_costs_no_other(house: House) -> None:
    port = house.listener.port
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("::1", port))
        other.listen()
        with pytest.raises(OptionError, match="taken"):
            house.listener.move(["127.0.0.1", "::1"])
        assert await reaches("127.0.0.1", port)
    house.listener.move(["127.0.0.1", "::1"])
    assert await reaches("::1", port)


async def test_a_listener_that_is_closed_moves_nowhere(house: House) -> None:
    port = house.listener.port
    await house.listener.close()
    house.listener.move(["::1"])
    assert not await reaches("::1", port)
