"""Routes of another room on the page's sites, behind the same checks of Host, Origin and cookie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from p2ptrain.page.guard import JSON_ALONE
from p2ptrain.page.sessions import Reach


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
