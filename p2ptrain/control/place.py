"""A device has one place in the household: one identity, one name, one port.

`join` holds it for days; `train` on the same device borrows it and gives it back:

    join                     control API                 train
    member runs   <--------  borrow()  <---------------  step-aside (a connection)
    leaves, `lend(place)` -> place  ------------------>  starts as that member
    `given_back`  <--------  the connection closes <---  ends, or dies
    member runs again

No step needs a promise of the borrower's: a dead borrower's connection closes by itself. A pairing
window goes along and comes back with its end and its tries, or closed: it is never opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.errors import UserError
from p2ptrain.mesh.window import Window


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


@dataclass(frozen=True, slots=True)
class Place:
    """What a borrower takes over besides the state folder.

    Attributes:
        name: this device's name in the household.
        port: the TCP port that the others know it by.
        window: the pairing window, on the running loop's clock; None where it is closed.
    """

    name: str
    port: int
    window: Window | None


@dataclass(slots=True)
class Loan:
    """A place that is lent, on either side of the control API.

    Attributes:
        place: as the lender left it.
        window: what is left of the pairing window when the loan ends; None where it is closed, or
            where that is not known.
    """

    place: Place
    window: Window | None


class Lender:
    """The place of this process: who asks for it, who has it.

    Attributes:
        member: the member that runs here now, or None while it does not.
        wanted: another program asks for the place.
        given_back: it is not lent.
        window: the pairing window as the last user of the place left it.
    """

    def __init__(self) -> None:
        self.member: Member | None = None
        self.wanted = asyncio.Event()
        self.given_back = asyncio.Event()
        self.given_back.set()
        self.window: Window | None = None
        self._lent: asyncio.Future[Place] | None = None

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[Loan]:
        """Ask for the place, wait until the member has left it, and give it back at the end.

        Raises:
            UserError: another program has it, or the member has a part in a job, which would fail
                without it.
        """
        if self._lent is not None:
            raise UserError(
                "another p2ptrain on this device is in the household now: wait until it ends"
            )
        holder = self.member.trains_for() if self.member is not None else None
        if holder is not None:
            raise UserError(
                f"this device is computing for {holder}'s training: wait until that ends "
                "(`p2ptrain status` shows it), or train with --local"
            )
        self._lent = asyncio.get_running_loop().create_future()
        self.given_back.clear()
        self.wanted.set()
        try:
            place = await self._lent
            loan = Loan(place, place.window)
            try:
                yield loan
            finally:
                self.window = loan.window
        finally:
            self._lent = None
            self.wanted.clear()
            self.given_back.set()

    def lend(self, place: Place) -> None:
        """The member has left `place`: hand it to the borrower, if it still waits."""
        if self._lent is not None and not self._lent.done():
            self._lent.set_result(place)


class FixedMember:
    """A member that does not step aside: that of a running `train`."""

    def __init__(self, member: Member) -> None:
        self.member: Member | None = member

    def borrow(self) -> contextlib.AbstractAsyncContextManager[Loan]:
        """Refuse. Raises UserError."""
        raise UserError("`p2ptrain train` already runs with this state folder: wait until it ends")


class Host(Protocol):
    """What the control server serves: a `Lender` or a `FixedMember`."""

    member: Member | None

    def borrow(self) -> contextlib.AbstractAsyncContextManager[Loan]:
        """Ask the member to step aside for as long as the context lasts."""
