"""The lease of this device's one identity, with its name and port: `join` lends it to `train`.

    join                                   train
    member runs    <-------------------    asks it to step aside
    leaves, releases the folder's lock
    `lend(lease)`  ------------------->    takes the lock, starts as that member
    takes the lock <-------------------    ends, or dies: the system releases the lock
    member runs again

A pairing window goes along and comes back with its end and its tries, or closed where the borrower
died: it is never opened again. A lease travels as JSON in `step-aside` and `give-back`. Two
processes' clocks need not agree, so a window travels as the seconds that are left of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from p2ptrain.aio.tasks import set_within
from p2ptrain.control.member_lock import FolderBusy, FolderLock
from p2ptrain.errors import ProtocolError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.trust.pairing_window import CODE_DIGITS, WINDOW_SECONDS, PairingWindow
from p2ptrain.net.forms import Count, Range, Text, write_form
from p2ptrain.net.read_form import read_form

TAKE_SECONDS = 5.0
"""For a borrower that was let in: it tries every RETRY_SECONDS."""

RETRY_SECONDS = 0.1


class ControlledMember(Protocol):
    """What commands ask of a running member; `p2ptrain.Node` is one."""

    def status(self) -> Mapping[str, Any]:
        """Who is here, who coordinates, what runs."""

    def invite(self) -> str:
        """Open the pairing window and return its code."""

    def devices(self) -> Sequence[Mapping[str, Any]]:
        """The trusted devices."""

    async def links(self) -> Sequence[Mapping[str, Any]]:
        """How fast the links to the other members are, measured now."""

    async def explain(self) -> Mapping[str, Any]:
        """What limits the job that runs or ran last."""

    async def remove(self, name: str) -> None:
        """Revoke a device at once."""

    def trains_for(self) -> str | None:
        """Name of the device whose job this one has a part in; None without one."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where the live page is, each with a token that counts once.

    Attributes:
        url: for a browser on this device.
        lan_url: for other devices in this network; None where they may not look.
    """

    url: str
    lan_url: str | None = None


class PageDoor(Protocol):
    """The live page of a running member."""

    async def state(self) -> object:
        """What it shows now, also where it is not open: a form (`p2ptrain.page.state`)."""

    async def open(self, *, lan: bool, photos: Path | None = None) -> PageAddress:
        """Serve it, from now on; `photos`: the folder for pictures that it takes."""

    async def close(self) -> None:
        """End that, for good."""


@dataclass(slots=True)
class LeasedIdentity:
    """What a borrower takes over besides the state folder.

    Attributes:
        name: this device's name in the household; None where no member had the place.
        port: the TCP port that the others know it by; None alike.
        window: the pairing window, on the running loop's clock; None where it is closed. What is
            left of it when the borrower ends goes back to the lender.
    """

    name: str | None = None
    port: int | None = None
    window: PairingWindow | None = None


class Lender:
    """The place of this process: who asks for it, who has it.

    Attributes:
        member: the member that runs here now, or None while it does not.
        page: its page.
        wanted: another program asks for the place, or has it.
        window: the pairing window as the last user of the place left it.
    """

    def __init__(
        self,
        member: ControlledMember | None = None,
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
        self.page: PageDoor | None = None
        self.wanted = asyncio.Event()
        self.window: PairingWindow | None = None
        self._keeps = keeps
        self._take_seconds = take_seconds
        self._left: asyncio.Future[LeasedIdentity] | None = None
        self._was_taken = False  # by the borrower

    async def step_aside(self) -> LeasedIdentity:
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
        """This process ends before its member has left: the program that asked gets an error."""
        if self._left is not None:
            self._left.cancel()

    def give_back(self, window: PairingWindow | None) -> None:
        """The borrower ends, and leaves that of the pairing window."""
        self.window, self._was_taken = window, True

    async def lend(self, place: LeasedIdentity, lock: FolderLock, stop: asyncio.Event) -> None:
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
            await set_within(stop, RETRY_SECONDS)  # it is another process's lock
        if not self._was_taken:
            self.window = place.window
        self.wanted.clear()


OTHER_VERSION = "the running p2ptrain join is another version: stop it and start it again"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _LeaseGranted:
    name: str
    port: Annotated[int, Range(0, 65535)]
    window: Any = None


@dataclass(frozen=True, slots=True)
class _Left:
    """Of a window."""

    code: Annotated[str, Text(CODE_DIGITS, CODE_DIGITS, like="[0-9]+")]
    seconds_left: float
    wrong_tries: Count
    invited: bool


def place_fields(place: LeasedIdentity, now: float) -> dict[str, Any]:
    """What the lender sends; `now` is on the clock of the place's window."""
    return {"name": place.name, "port": place.port, **window_fields(place.window, now)}


def read_place(fields: object, now: float) -> LeasedIdentity:
    """The other side of `place_fields`.

    Raises:
        UserError: it is something else.
    """
    try:
        said = read_form(_LeaseGranted, fields, "a place", extra=True)
    except ProtocolError as error:
        raise UserError(OTHER_VERSION) from error
    return LeasedIdentity(said.name, said.port, _window(said.window, now))


def window_fields(window: PairingWindow | None, now: float) -> dict[str, Any]:
    """What the borrower says last."""
    if window is None:
        return {"window": None}
    left = _Left(window.code, window.closes_at - now, window.wrong_tries, window.invited)
    return {"window": write_form(left)}


def read_window(text: str, now: float) -> PairingWindow | None:
    """The window in the borrower's last word."""
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        _log.warning("the borrower of this device's place gave back something else", why=str(error))
        return None
    return _window(fields.get("window") if isinstance(fields, dict) else fields, now)


def _window(fields: Any, now: float) -> PairingWindow | None:
    if fields is None:
        return None
    try:
        left = read_form(_Left, fields, "a pairing window that another process had")
    except ProtocolError as error:
        _log.warning("a pairing window is closed because it cannot be read", why=str(error))
        return None
    closes_at = now + min(left.seconds_left, WINDOW_SECONDS)
    return PairingWindow(left.code, closes_at, left.wrong_tries, left.invited)
