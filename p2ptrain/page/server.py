"""Serves the page for as long as a member lives, once its user has asked for it.

`page.json` in the state folder has the port and the key of the cookies, so the page is at the same
address, for the same browsers, when the member starts again, and while `train` has its place.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from aiohttp import web

from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.control.lease import PageAddress
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.config import peer_text
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.net.forms import Range, Text
from p2ptrain.page.scripts import AllowedScripts
from p2ptrain.page.sessions import Reach, Sessions
from p2ptrain.page.site import Mount, PageSite
from p2ptrain.page.source import PageSource
from p2ptrain.page.state import PageState

if TYPE_CHECKING:
    from p2ptrain.api.node import Node

log = get_logger(__name__)

PAGE_FILE = "page.json"

METRICS_TOKEN_FILE = "page_metrics_token"

USUAL_PORT = 47380

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PageFile:
    """What survives a restart.

    Attributes:
        key: of the cookies, 64 hex digits.
        lan: browsers in the network may look.
    """

    key: Annotated[str, Text(64, 64, like="[0-9a-f]+")]
    port: Annotated[int, Range(1, 65535)]
    lan: bool


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Of strangers.

    Attributes:
        silent_seconds: for a connection to show a cookie.
        silent_count: connections without one; the oldest ones go.
    """

    silent_seconds: float = 10.0
    silent_count: int = 64


class _Listening:
    """One site that listens."""

    def __init__(self, site: PageSite, runner: web.AppRunner) -> None:
        self.site = site
        self.runner = runner
        self.since: dict[int, float] = {}  # when a connection was first seen, by id

    def sweep(self, now: float, limits: ServerLimits) -> None:
        """End connections of those who do not say who they are."""
        server = self.runner.server
        connections = {} if server is None else {id(c): c for c in server.connections}
        self.site.proved.intersection_update(connections)
        silent = [key for key in connections if key not in self.site.proved]
        self.since = {key: self.since.get(key, now) for key in silent}
        too_many = len(silent) - limits.silent_count
        for index, key in enumerate(silent):  # as they came
            if index < too_many or now - self.since[key] >= limits.silent_seconds:
                connections[key].force_close()


class PageServer:
    """The page of one member; a context."""

    def __init__(
        self,
        folder: Path,
        member: Node,
        *,
        source: PageSource | None = None,
        limits: ServerLimits | None = None,
        mounts: Sequence[Mount] = (),
        scripts: AllowedScripts | None = None,
    ) -> None:
        """`mounts`: what other rooms show on it; `scripts`: that browsers here may start."""
        self._mounts = mounts
        self._state = StateFolder(folder)
        self._member = member
        self._source = source or PageSource(member, scripts=scripts)
        self._limits = limits or ServerLimits()
        self._file: PageFile | None = None
        self._sessions: Sessions | None = None
        self._listening: dict[Reach, _Listening] = {}
        self._opening = asyncio.Lock()
        self._scraper = ""  # the token that lets one read /metrics
        self._tasks = TaskOwner(_failed)

    async def __aenter__(self) -> Self:
        """Open the page again where it was open when the member stopped."""
        try:
            kept = self._state.read_form(PAGE_FILE, PageFile)
            if kept is not None:
                await self._open(kept, lan=kept.lan)
        except (BrokenFile, UserError, OSError) as error:
            log.warning("page_not_opened", why=str(error), advice="run p2ptrain page again")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; browsers come back by themselves when the page does."""
        await self._stop_listening()
        await self._tasks.cancel()

    async def open(self, *, lan: bool, path: str = "/") -> PageAddress:
        """The page's address, with a token that counts once; `lan`: for other devices too.

        Args:
            path: of what is opened: "/", or that of a mount.

        Raises:
            UserError: it cannot be opened.
        """
        async with self._opening:
            if self._file is None:
                kept = self._kept() or PageFile(secrets.token_hex(32), USUAL_PORT, lan=False)
                await self._open(kept, lan=False)
            if lan:
                await self._open_lan()
        assert self._file is not None
        self._keep(replace(self._file, lan=self._file.lan or lan))
        return PageAddress(self._url(Reach.HERE, path), self._url(Reach.LAN, path) if lan else None)

    async def close(self) -> None:
        """Close the page; every browser has to be let in again."""
        async with self._opening:
            await self._stop_listening()
            await self._tasks.cancel()
            self._state.remove(PAGE_FILE)
            self._state.remove(METRICS_TOKEN_FILE)

    async def state(self) -> PageState:
        """What the page shows now, for this device's own commands."""
        return await self._source.state(Reach.HERE)

    # -- listening -------------------------------------------------------------------------------

    async def _open(self, kept: PageFile, *, lan: bool) -> None:
        self._sessions = Sessions(bytes.fromhex(kept.key))
        self._scraper = self._metrics_token()
        port = await self._listen(Reach.HERE, LOOPBACK, kept.port)
        self._file = replace(kept, port=port)
        self._state.write(METRICS_TOKEN_FILE, self._scraper.encode())
        self._tasks.spawn(self._source.run(), "page")
        self._tasks.spawn(self._source.take_notes(), "page's notes")
        self._tasks.spawn(self._sweep(), "page's strangers")
        if lan:
            try:
                await self._open_lan()
            except UserError as error:  # another network than before
                log.warning("page_not_opened_to_the_network", why=str(error))

    async def _open_lan(self) -> None:
        """On the address by which the household knows this device."""
        assert self._file is not None
        address = self._member.status().address
        if _is_loopback(address):
            raise UserError(
                f"other devices cannot reach this one at {address}: it has no network, or join was "
                f"started with --interface {address}"
            )
        listening = self._listening.get(Reach.LAN)
        if listening is not None:
            if peer_text(address, self._file.port) in listening.site.hosts:
                return
            await self._end(Reach.LAN)  # this device has another address now
        await self._listen(Reach.LAN, address, self._file.port)

    async def _listen(self, reach: Reach, address: str, port: int) -> int:
        """Listen there, on another port where that one is taken; returns the port."""
        assert self._sessions is not None
        token = self._scraper if reach is Reach.HERE else ""
        site = PageSite(self._source, self._sessions, reach, token, mounts=self._mounts)
        runner = web.AppRunner(
            site.application(),
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=75.0,
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, address, port).start()
            except OSError as error:
                log.info("page_port_taken", port=port, why=str(error))
                await web.TCPSite(runner, address, 0).start()
        except OSError as error:
            await runner.cleanup()
            raise UserError(
                f"the page cannot be opened on {address}: {error.strerror or error}"
            ) from error
        port = runner.addresses[0][1]
        names = {peer_text(address, port)}
        site.hosts = names | {f"localhost:{port}"} if reach is Reach.HERE else names
        site.port = port
        self._listening[reach] = _Listening(site, runner)
        return port

    async def _end(self, reach: Reach) -> None:
        self._source.streams[reach].close()
        await self._listening.pop(reach).runner.cleanup()

    async def _stop_listening(self) -> None:
        self._file = None
        for reach in list(self._listening):
            await self._end(reach)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.silent_seconds / 4)
            now = asyncio.get_running_loop().time()
            for listening in self._listening.values():
                listening.sweep(now, self._limits)

    # -- the rest --------------------------------------------------------------------------------

    def _url(self, reach: Reach, path: str) -> str:
        assert self._sessions is not None
        listening = self._listening[reach]
        token = self._sessions.new_token(reach, asyncio.get_running_loop().time())
        host = listening.runner.addresses[0][0]
        return f"http://{peer_text(host, listening.site.port)}{path}?token={token}"

    def _metrics_token(self) -> str:
        known = self._state.read(METRICS_TOKEN_FILE)
        return known.decode("ascii", "replace") if known else secrets.token_urlsafe(32)

    def _kept(self) -> PageFile | None:
        try:
            return self._state.read_form(PAGE_FILE, PageFile)
        except BrokenFile as error:
            log.warning("page_forgotten", why=str(error))
            return None

    def _keep(self, file: PageFile) -> None:
        self._file = file
        self._state.write_form(PAGE_FILE, file)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _failed(name: str, error: BaseException) -> None:
    log.warning("page_task_failed", task=name, why=str(error) or type(error).__name__)
