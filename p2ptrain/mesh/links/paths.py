"""Several ways to one device (LAN, Wi-Fi, a VPN): the fastest that works carries the tensors.

A link uses one path, at first the one that answered first. Soon after, and at intervals while the
device has other addresses, the device of smaller id measures each path by a connection of its own:

    dialler                                   the other device
    TLS handshake  ---------------------->
    path {}, path {}, ... path {"ask"}  -->   (nothing is kept of them)
                                        <--   path {}              acknowledged: seconds and bytes

The link moves to a path that is at least `better_factor` times as fast: a dial as after a lost
link, which replaces it. A path that dies is left as soon as the device is suspected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

from p2ptrain.errors import LinkClosed, PeerError, ProtocolError
from p2ptrain.mesh.discovery.addresses import Address
from p2ptrain.net.frame import Header
from p2ptrain.net.link.link import Link
from p2ptrain.net.message import Message

PATH_KIND = "mesh.path"

_ASK = "ask"

_PADDING = "padding"

_PADDING_CHARACTERS = 3500

_MESSAGE_BYTES = _PADDING_CHARACTERS + 50


MakeLink: TypeAlias = Callable[[str], Link]

Dial: TypeAlias = Callable[[Sequence[Address], str, MakeLink], Awaitable[Link]]
"""(addresses, expected id, make_link) -> a link whose peer has proved to be that device."""


@dataclass(frozen=True, slots=True)
class ConnectionTimes:
    """How patient connections are, in seconds.

    Attributes:
        hello_seconds: for a hello or its answer. Raise: patience with frozen devices.
        crossing_seconds: the device of the greater id waits this long before it dials, so that
            dials rarely cross. Raise: slower where only it can dial.
        ask_old_seconds: for an answer over an old link when a new process shows up. Raise:
            slower restarts. Lower: a frozen process loses its identity to a copy.
        path_seconds: for an answer of a suspected device, before its link moves to another path;
            the device of the greater id waits `ask_old_seconds`. Lower: links move under load.
        goodbye_seconds: to send what is queued on a link that is stuck, when leaving.
    """

    hello_seconds: float = 5.0
    crossing_seconds: float = 0.05
    ask_old_seconds: float = 1.0
    path_seconds: float = 0.3
    goodbye_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class PathConfig:
    """When paths are measured, and when another one is taken.

    Attributes:
        first_seconds: after a link came up, or news of other addresses.
        again_seconds: after a look that changed nothing; doubles up to `rarest_seconds`.
        rarest_seconds: see `again_seconds`.
        measure_seconds: that one path is measured for, at most so long again for the last answer.
        limit_messages: of one measurement; what a hostile device may have taken in for nothing.
        better_factor: how many times as fast another path must be. A busy path looks slower than
            it is, and each change costs the round under way.
        most_paths: measured in one look.
    """

    first_seconds: float = 0.5
    again_seconds: float = 20.0
    rarest_seconds: float = 300.0
    measure_seconds: float = 0.3
    limit_messages: int = 2048
    better_factor: float = 2.0
    most_paths: int = 4


class PathSchedule:
    """When to look at the paths to one device. Pure: time is an argument."""

    def __init__(self, config: PathConfig) -> None:
        self._config = config
        self._pause_seconds = config.again_seconds
        self._known: frozenset[Address] = frozenset()
        self._due: float | None = None

    def link_up(self, now: float) -> None:
        """A link came up, over whichever path."""
        self._due = now + self._config.first_seconds
        self._pause_seconds = self._config.again_seconds

    def heard(self, addresses: Sequence[Address], now: float) -> None:
        """The device may be at these: new ones are worth a look soon."""
        if not self._known.issuperset(addresses):
            self._known |= frozenset(addresses)
            self.link_up(now)

    def looked(self, now: float) -> None:
        """The paths have been measured."""
        self._due = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, self._config.rarest_seconds)

    def seconds_left(self, now: float) -> float | None:
        """Until the next look; 0 if it is due; None while there is no link."""
        return None if self._due is None else max(self._due - now, 0.0)


def better_path(
    current: Address, rates: Mapping[Address, float], config: PathConfig
) -> Address | None:
    """The fastest path, if it is enough faster than the current one.

    Args:
        rates: measured bytes/s of the paths that work; the current one's may be missing.
    """
    others = {address: rate for address, rate in rates.items() if address != current}
    best = max(others, key=lambda address: others[address], default=None)
    if best is None or others[best] < config.better_factor * rates.get(current, 0.0):
        return None
    return best


class PathProbe:
    """The measuring side of one connection; a `LinkReceiver`."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[PeerError | None] = asyncio.Queue(maxsize=2)

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview] | None:
        """Refuse. Raises ProtocolError."""
        raise ProtocolError("a path is answered without parts")

    def deliver(self, link: Link, message: Message) -> None:
        """What was sent has come."""
        if message.kind != PATH_KIND or self._answers.full():
            raise ProtocolError("a path that is measured is acknowledged once for each question")
        self._answers.put_nowait(None)

    def lost(self, link: Link, error: PeerError) -> None:
        """The connection has ended."""
        if not self._answers.full():
            self._answers.put_nowait(error)

    async def bytes_per_s(self, link: Link, config: PathConfig) -> float:
        """Send more and more until it takes `measure_seconds`; what the last burst made.

        Raises:
            LinkClosed: the connection ended, or nothing came back in time.
        """
        count, sent, rate = 8, 0, 0.0
        began = monotonic()
        while sent + count <= config.limit_messages:
            started = monotonic()
            await self._burst(link, count, config)
            seconds = max(monotonic() - started, 1e-6)
            sent, rate = sent + count, count * _MESSAGE_BYTES / seconds
            if monotonic() - began > config.measure_seconds / 2:
                break
            count *= 4
        return rate

    async def _burst(self, link: Link, count: int, config: PathConfig) -> None:
        padding = "x" * _PADDING_CHARACTERS
        try:
            async with asyncio.timeout(10 * config.measure_seconds):
                for number in range(count):
                    asks = {_ASK: True} if number == count - 1 else {}
                    await link.send(Message(PATH_KIND, {**asks, _PADDING: padding}))
                error = await self._answers.get()
        except TimeoutError:
            raise LinkClosed("this path is too slow") from None
        if error is not None:
            raise error


class PathAnswers:
    """The other side: how many messages of one connection have come for nothing."""

    def __init__(self, config: PathConfig) -> None:
        self._left = config.limit_messages

    def take(self, link: Link, message: Message) -> bool:
        """Whether `message` measures a path; it is answered where it asks. Raises ProtocolError."""
        if message.kind != PATH_KIND:
            return False
        self._left -= 1
        if self._left < 0:
            raise ProtocolError("a path is measured for ever")
        if message.fields.get(_ASK) is True:
            link.send_now(Message(PATH_KIND))
        return True
