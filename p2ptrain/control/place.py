"""A device has one place in the household: one identity, one name, one port.

`join` holds it for days; `train` on the same device borrows it and gives it back:

    join                                   train
    member runs    <-------------------    asks it to step aside
    leaves, lets go of the folder's lock
    `lend(place)`  ------------------->    takes the lock, starts as that member
    takes the lock <-------------------    ends, or dies: the system gives the lock back
    member runs again

A pairing window goes along and comes back with its end and its tries, or closed where the borrower
died: it is never opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.control.lock import FolderBusy, FolderLock
from p2ptrain.errors import UserError
from p2ptrain.mesh.window import Window

TAKE_SECONDS = 5.0
"""For a borrower that was let in: it tries every RETRY_SECONDS."""
RETRY_SECONDS = 0.1


class Member(Protocol):
    """What commands ask of a running member; `p2ptrain.Node` is one."""

    def status(self) -> Mapping[str, Any]:
        """Who is here, who coordinates, what runs."""

    def invite(self) -> str:
        """Open the pairing window and return its code."""

    def devices(self) -> Sequence[Mapping[str, Any]]:
        """The trusted devices."""

    async def links(self) -> Sequence[Mapping[str, Any]]:
        """How fast the links to the other members are, measured now."""

    async def remove(self, name: str) -> None:
        """Revoke a device at once."""

    def trains_for(self) -> str | None:
        """Name of the device whose job this one has a part in; None without one."""


@dataclass(slots=True)
class Place:
    """What a borrower takes over besides the state folder.

    Attributes:
        name: this device's name in the household; None where no member had the place.
        port: the TCP port that the others know it by; None alike.
        window: the pairing window, on the running loop's clock; None where it is closed. What is
            left of it when the borrower ends goes back to the lender.
    """

    name: str | None = None
    port: int | None = None
    window: Window | None = None


class Lender:
    """The place of this process: who asks for it, who has it.

    Attributes:
        member: the member that runs here now, or None while it does not.
        wanted: another program asks for the place, or has it.
        window: the pairing window as the last user of the place left it.
    """

    def __init__(
        self,
        member: Member | None = None,
        *,
        keeps: bool = False,
        take_seconds: float = TAKE_SECONDS,
    ) -> None:
        """The place is this process's.

        Args:
            keeps: it is not lent: that of a running `train`.
            take_seconds: for a borrower to take what was let go of.
        """
        self.member = member
        self.wanted = asyncio.Event()
        self.window: Window | None = None
        self._keeps = keeps
        self._take_seconds = take_seconds
        self._left: asyncio.Future[Place] | None = None
        self._was_taken = False  # by the borrower

    async def step_aside(self) -> Place:
        """The place, once the member has left it and the lock of its folder is free.

        Raises:
            UserError: another program has it, or the member has a part in a job, which would fail
                without it.
        """
        if self._keeps:
            raise UserError(
                "`p2ptrain train` already runs with this state folder: wait until it ends"
            )
        if self.wanted.is_set():
            raise UserError(
                "another p2ptrain on this device is in the household now: wait until it ends"
            )
        holder = self.member.trains_for() if self.member is not None else None
        if holder is not None:
            raise UserError(
                f"this device is computing for {holder}'s training: wait until that ends "
                "(`p2ptrain status` shows it), or train with --local"
            )
        self._left = asyncio.get_running_loop().create_future()
        self.wanted.set()
        return await self._left

    def refuse(self) -> None:
        """This process ends before its member has left: the program that asked hears of it."""
        if self._left is not None:
            self._left.cancel()

    def give_back(self, window: Window | None) -> None:
        """The borrower ends, and leaves that of the pairing window."""
        self.window, self._was_taken = window, True

    async def lend(self, place: Place, lock: FolderLock, stop: asyncio.Event) -> None:
        """The member has left `place`: wait until the borrower has let go of `lock`, or `stop`.

        However the borrower ends, the system gives its lock back; one that never takes it has
        `take_seconds`.
        """
        loop = asyncio.get_running_loop()
        lock.release()
        if self._left is not None and not self._left.done():
            self._left.set_result(place)
        self.window, self._was_taken = None, False
        deadline = loop.time() + self._take_seconds
        while not stop.is_set():
            try:
                lock.take()
            except FolderBusy:
                self._was_taken = True
            else:
                if self._was_taken or loop.time() > deadline:
                    break
                lock.release()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):  # another process's lock
                    await stop.wait()
        if not self._was_taken:
            self.window = place.window
        self.wanted.clear()
