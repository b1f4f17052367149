"""A page with its files; routes of another room, behind the same checks as the page's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from aiohttp import web

from p2ptrain.page.guard import JSON_ALONE
from p2ptrain.page.sessions import Reach


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
