"""The member's side of the control API: HTTP over a unix socket in a folder of its own (0700).

Where there are no unix sockets (Windows) it listens on 127.0.0.1. A web page in the user's browser
can reach that too, so every request must carry the token of `control.json`, a Host that is ours
(DNS rebinding) and no Origin (other sites' pages); requests are at most 1 MiB.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from aiohttp import web

from p2ptrain.control.lease import ControlledMember, Lender, place_fields, read_window
from p2ptrain.control.member_lock import ControlRecord, read_record, remove_record, write_record
from p2ptrain.errors import PeerError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.net.forms import write_form

SOCKET_HOST = "p2ptrain"
"""The Host header of requests over the unix socket."""

_SOCKET_FOLDER_PREFIX = "p2ptrain-"

BODY_LIMIT_BYTES = 1024 * 1024

_log = get_logger(__name__)

T = TypeVar("T")

_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlServer:
    """Serves `lender` to the commands on this machine, for as long as the context lasts."""

    def __init__(self, folder: Path, lender: Lender, *, unix_socket: bool | None = None) -> None:
        """`unix_socket`: default as the platform can."""
        self._folder = folder
        self._lender = lender
        self._unix_socket = sys.platform != "win32" if unix_socket is None else unix_socket
        self._token = secrets.token_hex(32)
        self._runner: web.AppRunner | None = None
        self._socket_folder: str | None = None
        self._record: ControlRecord | None = None
        self._allowed_host = SOCKET_HOST

    async def __aenter__(self) -> Self:
        """Listen, then publish where."""
        sweep(self._folder)
        self._runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            address = await self._listen(self._runner)
            self._record = ControlRecord(address, self._token, os.getpid())
            self.publish()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; commands find no member from now on."""
        await self._close()

    def publish(self) -> None:
        """Write `control.json`; again after a borrower had put its own there."""
        assert self._record is not None
        write_record(self._folder, self._record)

    async def _listen(self, runner: web.AppRunner) -> str:
        if not self._unix_socket:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._allowed_host = f"127.0.0.1:{runner.addresses[0][1]}"
            return self._allowed_host
        # A temporary folder: the path of a unix socket may have 104 characters only.
        self._socket_folder = tempfile.mkdtemp(prefix=_SOCKET_FOLDER_PREFIX)
        path = os.path.join(self._socket_folder, "control")
        await web.UnixSite(runner, path).start()
        return path

    async def _close(self) -> None:
        if self._record is not None:
            remove_record(self._folder, self._record)
        self._lender.refuse()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)

    def application(self) -> web.Application:
        """The requests that it answers, each behind the same guard."""
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[self._guard])
        app.router.add_get("/status", self._status)
        app.router.add_get("/devices", self._devices)
        app.router.add_get("/links", self._links)
        app.router.add_get("/explain", self._explain)
        app.router.add_get("/state", self._state)
        app.router.add_post("/invite", self._invite)
        app.router.add_post("/remove", self._remove)
        app.router.add_post("/page", self._open_page)
        app.router.add_post("/page/close", self._close_page)
        app.router.add_post("/step-aside", self._step_aside)
        app.router.add_post("/give-back", self._give_back)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Answer) -> web.StreamResponse:
        """Refuse strangers before anything else is looked at; turn our errors into answers."""
        if not self._is_ours(request):
            _log.warning("control request refused", path=request.path)
            raise web.HTTPForbidden(text="refused")
        try:
            return await handler(request)
        except (UserError, PeerError) as error:
            return web.json_response({"error": str(error)}, status=409)

    def _is_ours(self, request: web.Request) -> bool:
        token = request.headers.get("Authorization", "")
        return (
            hmac.compare_digest(_bytes(token), _bytes(f"Bearer {self._token}"))
            and request.host == self._allowed_host
            and "Origin" not in request.headers
        )

    def _member(self) -> ControlledMember:
        return _there(self._lender.member)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(dict(self._member().status()))

    async def _devices(self, request: web.Request) -> web.Response:
        return web.json_response([dict(device) for device in self._member().devices()])

    async def _links(self, request: web.Request) -> web.Response:
        return web.json_response([dict(link) for link in await self._member().links()])

    async def _explain(self, request: web.Request) -> web.Response:
        return web.json_response(dict(await self._member().explain()))

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(write_form(await _there(self._lender.page).state()))

    async def _invite(self, request: web.Request) -> web.Response:
        return web.json_response({"code": self._member().invite()})

    async def _remove(self, request: web.Request) -> web.Response:
        name = await text_field(request, "name")
        await self._member().remove(name)
        return web.json_response({"removed": name})

    async def _open_page(self, request: web.Request) -> web.Response:
        page, photos = _there(self._lender.page), request.query.get("photos")
        address = await page.open(
            lan=bool(request.query.get("lan")), photos=Path(photos) if photos else None
        )
        return web.json_response({"url": address.url, "lan_url": address.lan_url})

    async def _close_page(self, request: web.Request) -> web.Response:
        await _there(self._lender.page).close()
        return web.json_response({})

    async def _step_aside(self, request: web.Request) -> web.Response:
        """The place, as soon as the member has left it."""
        return web.json_response(place_fields(await self._lender.step_aside(), _now()))

    async def _give_back(self, request: web.Request) -> web.Response:
        self._lender.give_back(read_window(await request.text(), _now()))
        return web.json_response({})


def sweep(folder: Path) -> None:
    """Remove the socket's folder of a member that was killed with that state `folder`."""
    try:
        record = read_record(folder)
    except UserError:
        return  # nothing was left, or nothing that can be trusted
    place = Path(record.address).parent
    ours = place.parent == Path(tempfile.gettempdir()) and place.name.startswith(
        _SOCKET_FOLDER_PREFIX
    )
    if ours and not psutil.pid_exists(record.pid):
        shutil.rmtree(place, ignore_errors=True)


def _there(part: T | None) -> T:
    """A part of the member that runs here. Raises UserError: there is none now."""
    if part is None:
        raise UserError("p2ptrain on this device is starting or stopping: try again in a moment")
    return part


def _now() -> float:
    """On the clock of pairing windows."""
    return asyncio.get_running_loop().time()


def _bytes(header: str) -> bytes:
    """Of a header, which may hold any bytes: what is no UTF-8 is read as surrogates."""
    return header.encode("utf-8", "surrogateescape")


async def text_field(request: web.Request, key: str) -> str:
    """Of the request's JSON. Raises UserError: there is none."""
    try:
        body: Any = json.loads(await request.read())
        value = body[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise UserError(f"the request needs a text {key!r}")
    return value
