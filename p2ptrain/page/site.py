"""The page's routes for browsers of one reach: this device's own, or those of its network.

Nothing is answered to those without a cookie but the exchange of a token for one. Routes of another
room (`Mount`) stand behind the same checks.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import get_args

from aiohttp import web

from p2ptrain.api.job_desk import Action
from p2ptrain.control.server import text_field
from p2ptrain.errors import PeerError, UserError
from p2ptrain.logs import get_logger
from p2ptrain.net.forms import write_form
from p2ptrain.page.sessions import (
    COOKIE_SECONDS,
    HEADERS,
    JSON_ALONE,
    MAX_BODY_BYTES,
    GuessLimit,
    Reach,
    Sessions,
    why_refused,
)
from p2ptrain.page.source import PageSource
from p2ptrain.page.state import CONTENT_TYPE, metrics_text
from p2ptrain.page.stream import TooManyBrowsers, as_json
from p2ptrain.plan.round_picture import RoundPicture

log = get_logger(__name__)

_FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "chart.js": "text/javascript",
    "rounds.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

_STRANGER = (
    "This page is not open to this browser, or its address was used already.\n"
    "Run  p2ptrain page  on the device and open the address that it prints.\n"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """Times of a site.

    Attributes:
        write_seconds: for a browser to take what was sent.
        quiet_seconds: until a sign of life is sent on a stream.
    """

    write_seconds: float = 10.0
    quiet_seconds: float = 15.0


class PageSite:
    """The application of one reach.

    Attributes:
        hosts: what Host may be; set once the site listens.
        port: where it listens.
        proved: ids of the connections on which a browser has shown its cookie.
    """

    def __init__(
        self,
        source: PageSource,
        sessions: Sessions,
        reach: Reach,
        metrics_token: str = "",
        settings: SiteSettings | None = None,
        mounts: Sequence[Mount] = (),
    ) -> None:
        """`metrics_token`: lets a scraper in; `mounts`: of other rooms."""
        self._mounts = mounts
        self._entrances = ("/", *(mount.path for mount in mounts))
        self.hosts: Collection[str] = ()
        self.port = 0
        self.proved: set[int] = set()
        self._source = source
        self._sessions = sessions
        self._reach = reach
        self._metrics_token = metrics_token
        self._settings = settings or SiteSettings()
        self._guesses = GuessLimit()
        self._shown = StaticPage(__package__, "page.html", _FILES)

    def application(self) -> web.Application:
        """For a runner, once."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.on_response_prepare.append(_add_headers)
        self._shown.add_routes(app.router, "/")
        app.router.add_get("/state", self._state)
        app.router.add_get("/rounds", self._rounds)
        app.router.add_get("/advice", self._advice)
        app.router.add_get("/events", self._events, allow_head=False)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/api/invite", self._invite)
        app.router.add_post("/api/remove", self._remove)
        app.router.add_post("/api/start", self._start)
        for action in get_args(Action):
            app.router.add_post(f"/api/{action}", partial(self._steer, action))
        for mount in self._mounts:
            mount.add_routes(app.router, self._reach)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        types = (mount.content_types for mount in self._mounts if mount.has(request.path))
        why = why_refused(
            *(request.method, request.path, request.host, request.headers, self.hosts),
            entrances=self._entrances,
            content_types=next(types, JSON_ALONE),
        )
        if why is not None:
            log.info("page_request_refused", path=request.path[:100], why=why)
            raise web.HTTPForbidden(text=f"refused: {why}\n")
        if self._is_scraper(request):
            return await handler(request)
        if not self._is_known(request):
            return await self._exchange(request, handler)
        self.proved.add(id(request.protocol))
        try:
            return await handler(request)
        except (UserError, PeerError) as error:
            return web.json_response({"error": str(error)}, status=409)

    # -- who asks --------------------------------------------------------------------------------

    @property
    def cookie_name(self) -> str:
        """Cookies do not know ports, and a machine may have several pages."""
        return f"p2ptrain_page_{self.port}"

    def _is_known(self, request: web.Request) -> bool:
        cookie = request.cookies.get(self.cookie_name)
        return self._sessions.is_known(cookie, self._reach, int(time.time()))

    def _is_scraper(self, request: web.Request) -> bool:
        if request.path != "/metrics" or not self._metrics_token:
            return False
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {self._metrics_token}".encode())

    async def _exchange(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The page and a cookie for a token, once."""
        token, address = request.query.get("token"), request.remote or ""
        now = asyncio.get_running_loop().time()
        if token is None or request.method != "GET" or request.path not in self._entrances:
            raise web.HTTPForbidden(text=_STRANGER)
        if self._guesses.is_over(address, now):
            raise web.HTTPTooManyRequests(text="too many wrong tokens: wait a minute\n")
        cookie = self._sessions.redeem(token[:100], self._reach, now, int(time.time()))
        if cookie is None:
            self._guesses.wrong(address, now)
            raise web.HTTPForbidden(text=_STRANGER)
        response = await handler(request)
        response.set_cookie(
            self.cookie_name,
            cookie,
            max_age=COOKIE_SECONDS,
            path="/",
            httponly=True,
            samesite="Strict",
        )
        return response

    # -- what is shown ---------------------------------------------------------------------------

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(await self._source.sections(self._reach), dumps=as_json)

    async def _rounds(self, request: web.Request) -> web.Response:
        """What pages ask for while they show it."""
        picture = await self._source.rounds.get()
        return web.json_response(write_form(picture or RoundPicture()), dumps=as_json)

    async def _advice(self, request: web.Request) -> web.Response:
        """What limits the job, and what one more or one fewer device would change.

        Not for browsers that only look: the planner searches for some seconds.
        """
        self._check_may_change()
        found = await self._source.advice.get()
        return web.json_response({"points": found["points"]}, dumps=as_json)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = metrics_text(await self._source.state(self._reach))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """The state, then its changes. A browser that takes nothing is let go of."""
        settings = self._settings
        try:
            async with self._source.watching(self._reach) as watcher:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(b"retry: 1000\n\n")
                async for frame in watcher.frames(settings.quiet_seconds):
                    async with asyncio.timeout(settings.write_seconds):
                        await response.write(frame)
                    if watcher.is_gone:
                        break
        except TooManyBrowsers:
            raise web.HTTPServiceUnavailable(text="too many browsers look already\n") from None
        except (TimeoutError, ConnectionError):  # it stalls, or is gone
            if request.transport is not None:
                request.transport.abort()
        return response

    # -- what is changed -------------------------------------------------------------------------

    async def _invite(self, request: web.Request) -> web.Response:
        self._check_may_change()
        self._source.member.invite()
        return await self._changed()

    async def _remove(self, request: web.Request) -> web.Response:
        self._check_may_change()
        await self._source.member.remove(await text_field(request, "name"))
        return await self._changed()

    async def _start(self, request: web.Request) -> web.Response:
        self._check_may_change()
        scripts = self._source.scripts
        if scripts is None:
            raise UserError("no script may be started here: p2ptrain join --allow-script SCRIPT")
        await scripts.start(await text_field(request, "script"))
        return await self._changed()

    async def _steer(self, action: Action, request: web.Request) -> web.Response:
        self._check_may_change()
        await self._source.member.steer_job(await text_field(request, "run"), action)
        return await self._changed()

    def _check_may_change(self) -> None:
        if self._reach is not Reach.HERE:
            raise web.HTTPForbidden(text="refused: this browser may only look\n")

    async def _changed(self) -> web.Response:
        self._source.look_again()
        return web.json_response({})


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


class StaticPage:
    """A page and the files that it names, read once.

    Args:
        package: whose folder `static` has them.
        page: the page's file.
        types: of the other files, by name.
    """

    def __init__(self, package: str, page: str, types: Mapping[str, str]) -> None:
        folder = files(package) / "static"
        self._page = (folder / page).read_text("utf-8")
        self._types = types
        self._files = {name: (folder / name).read_bytes() for name in types}

    def add_routes(self, router: web.UrlDispatcher, path: str) -> None:
        """The page at `path`, its files at `static/NAME` below it."""
        router.add_get(path, self._answer_page, allow_head=False)
        router.add_get(f"{path.rstrip('/')}/static/{{name}}", self._answer_file)

    async def _answer_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    async def _answer_file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._types:
            raise web.HTTPNotFound
        type_ = self._types[name]
        return web.Response(body=self._files[name], content_type=type_, charset="utf-8")


@dataclass(frozen=True, slots=True)
class Mount:
    """Everything at `path` and below it is answered by another room.

    A handler reads a large body from `request.content`, piece by piece, and bounds it itself:
    `request.read()` refuses what is larger than the page's own requests. `UserError` and
    `PeerError` that it raises are answered as {"error": text}, with status 409.

    Attributes:
        path: such as "/add"; an address of it with a token lets a browser in, as that of "/" does.
        add_routes: adds them to the site of that reach; called when the site begins to listen.
        content_types: of bodies below `path`.
    """

    path: str
    add_routes: Callable[[web.UrlDispatcher, Reach], None]
    content_types: frozenset[str] = JSON_ALONE

    def has(self, path: str) -> bool:
        """Whether a request for `path` is its own."""
        return path == self.path or path.startswith(f"{self.path}/")
