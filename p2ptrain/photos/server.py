"""The page of a member with its folder of pictures, which outlives a restart as the page does.

`/add` on it: pictures from a phone into the holder's folder, and labels corrected. The page's guard
has checked Host, Origin and cookie before a request comes here. Which folder it is only the command
line on that device says (`p2ptrain page --photos DIR`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from aiohttp import web

from p2ptrain.control.lease import PageAddress
from p2ptrain.errors import UserError, size_text
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.net.forms import Text
from p2ptrain.net.read_form import read_form
from p2ptrain.page.scripts import AllowedScripts
from p2ptrain.page.server import PageServer
from p2ptrain.page.sessions import Reach
from p2ptrain.page.site import Mount, StaticPage
from p2ptrain.photos.folder import PhotoFolder
from p2ptrain.photos.picture import PictureKind

if TYPE_CHECKING:
    from p2ptrain.api.node import Node

PATH = "/add"

_FILES = {"add.css": "text/css", "add.js": "text/javascript"}

_NOT_CHOSEN = (
    "no folder for pictures is chosen: run  p2ptrain page --lan --photos DIR  on the device that "
    "is to have them"
)


@dataclass(frozen=True, slots=True)
class UploadSettings:
    """Of pictures on their way.

    Attributes:
        piece_seconds: for the next piece of one to come.
        picture_seconds: for all of one.
        at_once: pictures that are taken in together.
        waiting: pictures whose browsers wait for that.
    """

    piece_seconds: float = 15.0
    picture_seconds: float = 120.0
    at_once: int = 2
    waiting: int = 32


@dataclass(frozen=True, slots=True)
class _Correction:
    """A label that is corrected."""

    label: Annotated[str, Text(255, 1)]
    file: Annotated[str, Text(255, 1)]
    to: Annotated[str, Text(255)]


class PhotoRoutes:
    """What browsers ask about one folder.

    Attributes:
        folder: where pictures go; None until it is chosen.
    """

    def __init__(self, device: Callable[[], str], settings: UploadSettings | None = None) -> None:
        """`device`: this device's name."""
        self.folder: PhotoFolder | None = None
        self._device = device
        self._settings = settings or UploadSettings()
        self._taking = asyncio.Semaphore(self._settings.at_once)
        self._coming = 0
        self._shown = StaticPage(__package__, "add.html", _FILES)

    def mount(self) -> Mount:
        """For the page's server."""
        types = frozenset({"application/json", *PictureKind})
        return Mount(PATH, self._add_routes, types)

    def _add_routes(self, router: web.UrlDispatcher, reach: Reach) -> None:
        async def state(request: web.Request) -> web.Response:
            return await self._state(reach)

        self._shown.add_routes(router, PATH)
        router.add_get(f"{PATH}/state", state)
        router.add_get(f"{PATH}/label", self._label)
        router.add_get(f"{PATH}/picture", self._picture)
        router.add_put(f"{PATH}/picture", self._add)
        router.add_post(f"{PATH}/move", self._move)

    # -- what is shown ---------------------------------------------------------------------------

    async def _state(self, reach: Reach) -> web.Response:
        folder, device = self.folder, self._device()
        if folder is None:
            return web.json_response({"device": device, "folder": None, "why": _NOT_CHOSEN})
        labels = await asyncio.to_thread(folder.labels)
        step, evaluated, pictures = await asyncio.to_thread(folder.uncertain)
        return web.json_response(
            {
                "device": device,
                "folder": str(folder.path),
                "is_near": reach is Reach.HERE,
                "labels": list(map(asdict, labels)),
                "uncertain": {
                    "step": step,
                    "evaluated": evaluated,
                    "pictures": list(map(asdict, pictures)),
                },
            }
        )

    async def _label(self, request: web.Request) -> web.Response:
        """Before pictures are sent under it."""
        text = request.query.get("text", "")
        return web.json_response({"label": await asyncio.to_thread(self._chosen().label, text)})

    async def _picture(self, request: web.Request) -> web.Response:
        label, file = request.query.get("label", ""), request.query.get("file", "")
        try:
            kind, content = await asyncio.to_thread(self._chosen().read, label, file)
        except UserError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        return web.Response(body=content, content_type=kind)

    # -- what is changed -------------------------------------------------------------------------

    async def _add(self, request: web.Request) -> web.Response:
        folder = self._chosen()
        label = request.query.get("label", "")
        async with self._turn():
            content = await self._content(request, folder.limits.picture_bytes)
            added = await asyncio.to_thread(folder.add, label, content)
        return web.json_response(asdict(added))

    async def _move(self, request: web.Request) -> web.Response:
        try:
            body: Any = json.loads(await request.read())
        except (ValueError, RecursionError):
            body = None
        asked = read_form(_Correction, body, "the request", UserError)
        label = await asyncio.to_thread(self._chosen().move, asked.label, asked.file, asked.to)
        return web.json_response({"label": label})

    def _chosen(self) -> PhotoFolder:
        if self.folder is None:
            raise UserError(_NOT_CHOSEN)
        return self.folder

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """So many pictures at once as this device's memory and disk like."""
        if self._coming >= self._settings.at_once + self._settings.waiting:
            raise UserError("too many pictures come at once: send this one again in a moment")
        self._coming += 1
        try:
            async with self._taking:
                yield
        finally:
            self._coming -= 1

    async def _content(self, request: web.Request, limit_bytes: int) -> bytes:
        """A body that is neither too large nor too slow."""
        too_large = UserError(f"a picture has {size_text(limit_bytes)} at most")
        if (request.content_length or 0) > limit_bytes:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(self._settings.picture_seconds):
                while True:
                    async with asyncio.timeout(self._settings.piece_seconds):
                        piece = await request.content.readany()
                    if not piece:
                        return bytes(content)
                    content += piece
                    if len(content) > limit_bytes:
                        raise too_large
        except TimeoutError:
            raise UserError("the picture did not come in time: send it again") from None


log = get_logger(__name__)

PHOTOS_FILE = "photos.json"


@dataclass(frozen=True, slots=True)
class PhotosFile:
    """What survives a restart."""

    folder: Annotated[str, Text(4096, 1)]


class PhotoPage(PageServer):
    """The page that also takes pictures, once a folder is chosen; a context."""

    def __init__(self, folder: Path, member: Node, scripts: AllowedScripts | None = None) -> None:
        """`folder`: the member's state folder; `scripts`: that browsers here may start."""
        self._routes = PhotoRoutes(lambda: member.status().name)
        self._kept_in = StateFolder(folder)
        super().__init__(folder, member, mounts=[self._routes.mount()], scripts=scripts)

    async def __aenter__(self) -> Self:
        """Both as they were when the member stopped."""
        try:
            kept = self._kept_in.read_form(PHOTOS_FILE, PhotosFile)
            if kept is not None:
                self._routes.folder = await asyncio.to_thread(PhotoFolder, Path(kept.folder))
        except (BrokenFile, UserError) as error:
            log.warning("photos_not_opened", why=str(error), advice="run p2ptrain page --photos")
        return await super().__aenter__()

    async def open(self, *, lan: bool, path: str = "/", photos: Path | None = None) -> PageAddress:
        """The page's address; with `photos`, that of `/add`, and pictures go there from now on.

        Raises:
            UserError: it cannot be opened, or the folder cannot be used.
        """
        if photos is None:
            return await super().open(lan=lan, path=path)
        folder = await asyncio.to_thread(self._opened, photos)
        address = await super().open(lan=lan, path=PATH)
        self._kept_in.write_form(PHOTOS_FILE, PhotosFile(str(folder.path)))
        self._routes.folder = folder
        return address

    def _opened(self, photos: Path) -> PhotoFolder:
        if self._kept_in.path.resolve().is_relative_to(photos.resolve()):
            raise UserError(f"{photos} has this device's keys in it: choose a folder of its own")
        return PhotoFolder(photos)

    async def close(self) -> None:
        """Close the page; the folder has to be chosen again."""
        self._routes.folder = None
        self._kept_in.remove(PHOTOS_FILE)
        await super().close()
