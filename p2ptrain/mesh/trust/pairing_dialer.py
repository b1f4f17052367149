"""Dials every device that may want to pair, while the user's code waits for one.

A device that could not be reached, was busy or took no codes is tried again, one that broke off a
few times; one that refused the code is not (pairing_service.py remembers that).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from p2ptrain.aio.tasks import set_within
from p2ptrain.errors import LinkClosed, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.discovery.addresses import DiscoveredDevice
from p2ptrain.mesh.trust.pairing import (
    PairingBrokenOff,
    PairingBusy,
    PairingWindowClosed,
    WrongCode,
)
from p2ptrain.mesh.trust.pairing_service import PairingService
from p2ptrain.net.link.stream import Address
from p2ptrain.net.transport.dial import Backoff

log = get_logger(__name__)

FIRST_RETRY_SECONDS = 0.2

RETRY_SECONDS = 2.0
"""The first pause, and the longest: a device that is invited again is tried within it."""

AT_ONCE = 4
"""Attempts side by side: each takes some computing on both devices."""

REMEMBERED_LIMIT = 1024


@dataclass(slots=True)
class _PutOff:
    """When a device may be tried again."""

    until: float
    backoff: Backoff


class PairingDialer:
    """Tries what discovery found and the addresses that the user gave."""

    def __init__(
        self,
        service: PairingService,
        found: Callable[[], Iterable[DiscoveredDevice]],
        is_paired: Callable[[str], bool],
        warn: Callable[[str], None],
        rng: Random,
    ) -> None:
        self._service = service
        self._found = found
        self._given: list[Address] = []  # those without a paired device yet
        self._ever_given: set[Address] = set()
        self._is_paired = is_paired
        self._warn = warn
        self._rng = rng
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._put_off: dict[str, _PutOff] = {}

    def wake(self) -> None:
        """A new device may be there."""
        self._wake.set()

    def give(self, given: Sequence[Address]) -> None:
        """Dial these addresses too; what came of one that was given before stands."""
        new = [address for address in given if address not in self._ever_given]
        new = new[: REMEMBERED_LIMIT - len(self._ever_given)]
        self._given += new
        self._ever_given.update(new)
        self.wake()

    async def run(self) -> None:
        """Dial whom there is while the window is open; until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._wake.clear()
                    self._start_due(tasks)
                    await self._wait()
        finally:
            self._running.clear()

    def _start_due(self, tasks: asyncio.TaskGroup) -> None:
        now = asyncio.get_running_loop().time()
        for key, addresses in self._targets():
            busy = key in self._running or len(self._running) >= AT_ONCE
            put_off = self._put_off.get(key)
            if not busy and (put_off is None or now >= put_off.until):
                task = tasks.create_task(self._attempt(key, addresses), name=f"pair {key[:16]}")
                self._running[key] = task

    def _targets(self) -> list[tuple[str, list[Address]]]:
        """Whom to dial: (key for remembering, addresses)."""
        if not self._service.is_open:
            return []
        found = [
            (candidate.id, list(candidate.addresses))
            for candidate in self._found()
            if not self._is_paired(candidate.id) and self._service.may_try(candidate.id)
        ]
        return found + [(f"{host}:{port}", [(host, port)]) for host, port in self._given]

    async def _attempt(self, key: str, addresses: list[Address]) -> None:
        try:
            await self._service.dial(addresses)
            self._forget(addresses)
        except PairingWindowClosed as error:
            self._later(key, str(error))
            if self._service.is_open:  # else the answer is our own
                self._warn(f"pairing with {addresses[0][0]} failed: {error}")
        except (PairingBrokenOff, PairingBusy, LinkClosed, socket.gaierror) as error:
            self._later(key, str(error))
        except WrongCode:
            self._forget(addresses)  # the user has been notified
        except PeerError as error:
            log.info("pairing_failed", device=key[:16], why=str(error))
            self._forget(addresses)
            self._warn(f"pairing with {addresses[0][0]} failed: {error}")
        finally:
            self._running.pop(key, None)
            self._wake.set()

    def _forget(self, addresses: list[Address]) -> None:
        self._given = [given for given in self._given if given not in addresses]

    def _later(self, key: str, why: str) -> None:
        log.info("pairing_put_off", device=key[:16], why=why)
        now = asyncio.get_running_loop().time()
        known = self._put_off.get(key)
        backoff = known.backoff if known else Backoff(self._rng, FIRST_RETRY_SECONDS, RETRY_SECONDS)
        if len(self._put_off) >= REMEMBERED_LIMIT:
            self._put_off.clear()  # a flood of made-up devices: at worst some are tried too soon
        self._put_off[key] = _PutOff(now + backoff.next_seconds(), backoff)

    async def _wait(self) -> None:
        """Until a new device may be there, or the next retry is due."""
        now = asyncio.get_running_loop().time()
        dues = [due.until - now for due in self._put_off.values() if due.until > now]
        await set_within(self._wake, min(dues, default=RETRY_SECONDS))
