"""The page of a member with its folder of pictures, which outlives a restart as the page does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from p2ptrain.control.lease import PageAddress
from p2ptrain.errors import UserError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.net.forms import Text
from p2ptrain.net.write_form import write_form
from p2ptrain.page.scripts import AllowedScripts
from p2ptrain.page.server import PageServer
from p2ptrain.photos.folder import PhotoFolder
from p2ptrain.photos.routes import PATH, PhotoRoutes

if TYPE_CHECKING:
    from p2ptrain.api.node import Node

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
        self._kept_in.write_json(PHOTOS_FILE, write_form(PhotosFile(str(folder.path))))
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
