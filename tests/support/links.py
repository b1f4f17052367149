"""Fakes and small builders shared by the tests of this room."""

from __future__ import annotations

import asyncio
import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2ptrain.errors import PeerError
from p2ptrain.net.frame import Header
from p2ptrain.net.link.link import Link
from p2ptrain.net.message import Message
from p2ptrain.net.transport.tls import certificate_id


@dataclass
class Inbox:
    """A `Receiver` that keeps everything and wakes those who wait for it."""

    messages: list[Message] = field(default_factory=list)
    losses: list[PeerError] = field(default_factory=list)
    opened: list[Header] = field(default_factory=list)
    open_parts_with: Callable[[Header], Sequence[memoryview]] | None = None
    on_deliver: Callable[[], None] = lambda: None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview]:
        self.opened.append(header)
        if self.open_parts_with is not None:
            return self.open_parts_with(header)
        return [memoryview(bytearray(size)) for size in header.part_bytes]

    def deliver(self, link: Link, message: Message) -> None:
        self.messages.append(message)
        self.changed.set()
        self.on_deliver()

    def lost(self, link: Link, error: PeerError) -> None:
        self.losses.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[Inbox], bool], seconds: float = 5.0) -> None:
        """Wait until `condition` holds; fails the test after `seconds`."""
        async with asyncio.timeout(seconds):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

    async def count(self, messages: int) -> list[Message]:
        """Wait for that many messages."""
        await self.until(lambda inbox: len(inbox.messages) >= messages)
        return self.messages

    async def loss(self) -> PeerError:
        """Wait for the end of the link."""
        await self.until(lambda inbox: bool(inbox.losses))
        return self.losses[0]


@dataclass
class FakeTimer:
    """A timer of `FakeClock`."""

    at: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """A `Clock` that stands still until asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass, running the timers that fall due, in order."""
        end = self.now + seconds
        while due := [timer for timer in self.timers if not timer.cancelled and timer.at <= end]:
            timer = min(due, key=lambda item: item.at)
            self.timers.remove(timer)
            self.now = timer.at
            timer.callback()
        self.now = end


@dataclass(frozen=True)
class Device:
    """A device's key and certificate, on disk and as DER."""

    pem_file: Path
    certificate_der: bytes

    @property
    def id(self) -> str:
        return certificate_id(self.certificate_der)


def make_device(folder: Path, name: str, year: int = 2020) -> Device:
    """A new P-256 device with a self-signed CA:FALSE certificate, of 50 years from `year` on."""
    pem, certificate_der = _certificate(name, year)
    file = folder / f"{name}.pem"
    file.write_bytes(pem)
    return Device(file, certificate_der)


@functools.cache
def _certificate(name: str, year: int) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=365 * 50))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    return certificate.public_bytes(serialization.Encoding.PEM) + key_pem, der
