"""The commands' side of the control API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp

from p2ptrain.control.lease import (
    OTHER_VERSION,
    LeasedIdentity,
    PageAddress,
    read_place,
    window_fields,
)
from p2ptrain.control.member_lock import ControlRecord, not_running, read_record
from p2ptrain.control.server import SOCKET_HOST
from p2ptrain.errors import UserError
from p2ptrain.mesh.trust.pairing_window import PairingWindow

_NO_ANSWER = (ValueError, RecursionError)
"""What reading a body raises that is not JSON, or too deep."""

REQUEST_TIMEOUT_SECONDS = 30.0
"""The member answers at once; a removal waits for the others' answers."""

EXPLAIN_TIMEOUT_SECONDS = 90.0
"""The job's holder watches rounds and asks the planner."""

STEP_ASIDE_TIMEOUT_SECONDS = 120.0
"""A member that computes for another device's job moves its work away before it leaves."""

GIVE_BACK_TIMEOUT_SECONDS = 5.0
"""The user waits for the end of a training, and a member that has stepped aside answers at once."""


class ControlClient:
    """Talks to the member that runs with a state folder.

    Every request raises NotRunning if there is none, and UserError with the member's own words.
    """

    def __init__(self, folder: Path) -> None:
        """Raises NotRunning: there is no member."""
        self._folder = folder
        self._record = read_record(folder)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the connection's pool."""
        self._session = aiohttp.ClientSession(
            base_url=f"http://{_host(self._record)}",
            connector=_connector(self._record),
            headers={"Authorization": f"Bearer {self._record.token}"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def status(self) -> dict[str, Any]:
        """`Node.status()` of the member."""
        return dict(await self._ask("GET", "/status"))

    async def devices(self) -> list[dict[str, Any]]:
        """`Node.devices()` of the member."""
        return list(await self._ask("GET", "/devices"))

    async def links(self) -> list[dict[str, Any]]:
        """`Node.links()` of the member."""
        return list(await self._ask("GET", "/links"))

    async def explain(self) -> dict[str, Any]:
        """`Node.explain()` of the member."""
        return dict(await self._ask("GET", "/explain", seconds=EXPLAIN_TIMEOUT_SECONDS))

    async def state(self) -> dict[str, Any]:
        """What the member's page shows: `p2ptrain.page.state.PageState`, as plain data."""
        return dict(await self._ask("GET", "/state"))

    async def invite(self) -> str:
        """Open the member's pairing window; returns the code."""
        return str((await self._ask("POST", "/invite"))["code"])

    async def remove(self, name: str) -> None:
        """Revoke the trust in device `name`."""
        await self._ask("POST", "/remove", {"name": name})

    async def open_page(self, *, lan: bool, photos: Path | None = None) -> PageAddress:
        """Have the member serve its page; `lan`: to this network too; `photos`: for pictures."""
        wanted = {"lan": "1"} if lan else {}
        if photos is not None:
            wanted["photos"] = str(photos)
        body = await self._ask("POST", f"/page?{urlencode(wanted)}")
        return PageAddress(str(body["url"]), body["lan_url"])

    async def close_page(self) -> None:
        """Have the member close its page, to every browser."""
        await self._ask("POST", "/page/close")

    async def step_aside(self) -> LeasedIdentity:
        """Have the member leave its place and let go of the folder's lock.

        It comes back once that has been taken and is free again.
        """
        body = await self._ask("POST", "/step-aside", seconds=STEP_ASIDE_TIMEOUT_SECONDS)
        return read_place(body, asyncio.get_running_loop().time())

    async def give_back(self, window: PairingWindow | None) -> None:
        """Say to the member that stepped aside what is left of the pairing window."""
        fields = window_fields(window, asyncio.get_running_loop().time())
        await self._ask("POST", "/give-back", fields, GIVE_BACK_TIMEOUT_SECONDS)

    async def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=seconds)
        with self._explained():
            request = self._open().request(method, path, json=body, timeout=timeout)
            async with request as response:
                if response.status in (404, 405):
                    raise UserError(OTHER_VERSION)
                if response.status == 409:
                    raise UserError((await response.json())["error"])
                response.raise_for_status()
                return await response.json()

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "ControlClient is a context manager"
        return self._session

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Foreign errors as ours, in one place."""
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            raise not_running(self._folder) from error
        except TimeoutError as error:
            raise UserError(
                f"p2ptrain on this device (process {self._record.pid}) does not answer"
            ) from error
        except (aiohttp.ClientError, *_NO_ANSWER) as error:
            raise UserError(
                f"p2ptrain on this device stopped before it answered ({error})"
            ) from error


def _host(record: ControlRecord) -> str:
    return SOCKET_HOST if _is_socket(record) else record.address


def _connector(record: ControlRecord) -> aiohttp.BaseConnector:
    if _is_socket(record):
        return aiohttp.UnixConnector(path=record.address)
    return aiohttp.TCPConnector()


def _is_socket(record: ControlRecord) -> bool:
    return not record.address.startswith("127.0.0.1:")
