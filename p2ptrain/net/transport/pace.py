"""How often something that costs may happen, how many strangers may be here, and who comes first.

`Pace` and `Admission` are pure: time is an argument. What is not allowed now is refused by the code
that asks, or waited for (`PaceQueue`): a handshake is the dearest thing a stranger can ask for. So
before it takes a turn its own first record must be there, whole, and be a TLS client's hello:
silence and noise cost us a socket and some bytes (`first_record`).
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2ptrain.errors import LinkClosed, ProtocolError

KEYS_LIMIT = 1024
"""Keys remembered; beyond that those go which have had no turn for the longest time."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` at once, and `per_second` in the long run."""

    per_second: float
    burst: float


@dataclass(slots=True)
class _RateBucket:
    """What is left of a rate."""

    left: float
    at: float

    def refill(self, rate: Rate, now: float) -> None:
        self.left = min(rate.burst, self.left + max(0.0, now - self.at) * rate.per_second)
        self.at = now

    def wait_seconds(self, rate: Rate) -> float:
        return max(0.0, 1.0 - self.left) / rate.per_second


class Pace(Generic[Key]):
    """Turns of keys.

    Args:
        each: of one key.
        in_all: of all keys together, but for those that are exempt.
    """

    def __init__(self, each: Rate, in_all: Rate) -> None:
        self._each = each
        self._in_all = in_all
        self._keys: dict[Key, _RateBucket] = {}  # who had a turn last stands last
        self._all = _RateBucket(in_all.burst, 0.0)

    def wait_seconds(self, key: Key, now: float, *, exempt: bool = False) -> float:
        """How long until `key` may have a turn; 0 now.

        Args:
            key: who asks.
            now: seconds on one clock, which never goes back.
            exempt: whether it needs no turn of `in_all`.
        """
        bucket = self._keys.get(key)
        wait = 0.0
        if bucket is not None:
            bucket.refill(self._each, now)
            wait = bucket.wait_seconds(self._each)
        if not exempt:
            self._all.refill(self._in_all, now)
            wait = max(wait, self._all.wait_seconds(self._in_all))
        return wait

    def take(self, key: Key, now: float, *, exempt: bool = False) -> bool:
        """Take a turn, if there is one; whether there was."""
        if self.wait_seconds(key, now, exempt=exempt) > 0.0:
            return False
        bucket = self._keys.pop(key, None) or _RateBucket(self._each.burst, now)
        bucket.left -= 1.0
        self._keys[key] = bucket
        if len(self._keys) > KEYS_LIMIT:
            del self._keys[next(iter(self._keys))]
        if not exempt:
            self._all.left -= 1.0
        return True

    def give_back(self, key: Key, *, exempt: bool = False) -> None:
        """The last turn of `key` does not count: it was no stranger's."""
        bucket = self._keys.get(key)
        if bucket is not None:
            bucket.left = min(self._each.burst, bucket.left + 1.0)
        if not exempt:
            self._all.left = min(self._in_all.burst, self._all.left + 1.0)


PER_ADDRESS_LIMIT = 8

TOTAL_LIMIT = 64


class Admission(Generic[Key]):
    """Pure bookkeeping of the strangers who are here."""

    def __init__(
        self, per_address_limit: int = PER_ADDRESS_LIMIT, total_limit: int = TOTAL_LIMIT
    ) -> None:
        self._per_address_limit = per_address_limit
        self._total_limit = total_limit
        self._address: dict[Key, str] = {}  # in the order of arrival
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._address)

    def admit(self, key: Key, address: str) -> Key | None:
        """Take in the connection `key`; returns the one that must be cut for it, if any."""
        evicted = self._to_evict(address)
        if evicted is not None:
            self.release(evicted)
        self._address[key] = address
        self._count[address] += 1
        return evicted

    def release(self, key: Key) -> None:
        """`key` has shown who it is, or has gone; harmless when repeated."""
        address = self._address.pop(key, None)
        if address is not None:
            self._count[address] -= 1
            self._count += Counter()  # forget the addresses that have none left

    def _to_evict(self, address: str) -> Key | None:
        if self._count[address] >= self._per_address_limit:
            crowded = address
        elif len(self._address) >= self._total_limit:
            crowded = self._count.most_common(1)[0][0]
        else:
            return None
        return next(key for key, where in self._address.items() if where == crowded)


HELLO_LIMIT_BYTES = 8 * 1024
"""Ours take some hundred bytes, with keys for times of quantum computers two thousand."""

MIN_PAUSE_SECONDS = 0.005
"""Between two looks at who waits."""

_HEAD_BYTES = 5

_HANDSHAKE, _CLIENT_HELLO = 0x16, 0x01


async def first_record(connection: socket.socket) -> bytes:
    """What has come of a connection once its first TLS record is there.

    Raises:
        LinkClosed: it ended before that.
        ProtocolError: it begins otherwise.
    """
    loop = asyncio.get_running_loop()
    received = b""
    while _missing_bytes(received) > 0:
        piece = await loop.sock_recv(connection, HELLO_LIMIT_BYTES - len(received))
        if not piece:
            raise LinkClosed("the other device hung up")
        received += piece
    return received


def _missing_bytes(received: bytes) -> int:
    """Of the first record; of its head, while that is not whole. Raises ProtocolError."""
    begins_well = received[:1] in (b"", bytes([_HANDSHAKE])) and received[1:2] in (b"", b"\x03")
    if not begins_well or received[5:6] not in (b"", bytes([_CLIENT_HELLO])):
        raise ProtocolError("it does not begin with a TLS hello")
    if len(received) < _HEAD_BYTES:
        return _HEAD_BYTES - len(received)
    size = _HEAD_BYTES + int.from_bytes(received[3:_HEAD_BYTES])
    if not _HEAD_BYTES < size <= HELLO_LIMIT_BYTES:
        raise ProtocolError("its TLS hello claims too many bytes")
    return size - len(received)


class PaceQueue:
    """Gives out the turns of a pace. Of those who wait the newest goes first: who has waited
    longest is the likeliest to be one of a flood."""

    def __init__(self, pace: Pace[str]) -> None:
        self._pace = pace
        self._waiting: list[tuple[str, bool, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, host: str, *, exempt: bool) -> None:
        """Wait for a turn of that address."""
        loop = asyncio.get_running_loop()
        if self._pace.take(host, loop.time(), exempt=exempt):
            return
        turn: asyncio.Future[None] = loop.create_future()
        entry = (host, exempt, turn)
        self._waiting.append(entry)
        self._look_within(self._pace.wait_seconds(host, loop.time(), exempt=exempt), loop)
        try:
            await turn
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def give_back(self, host: str, *, exempt: bool) -> None:
        """Who had a turn has proved to be no stranger."""
        self._pace.give_back(host, exempt=exempt)

    def _look_within(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Serve those who wait in so many seconds at the latest."""
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._serve, loop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        for entry in reversed(self._waiting.copy()):
            host, exempt, turn = entry
            if not turn.done() and self._pace.take(host, now, exempt=exempt):
                self._waiting.remove(entry)
                turn.set_result(None)
        waits = [self._pace.wait_seconds(host, now, exempt=ex) for host, ex, _ in self._waiting]
        if waits:
            self._look_within(max(min(waits), MIN_PAUSE_SECONDS), loop)
