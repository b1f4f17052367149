"""Server and client over a real socket: answers, refusals, and the place that is lent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from p2ptrain.control.client import ControlClient
from p2ptrain.control.lease import LeasedIdentity, Lender
from p2ptrain.control.member_lock import (
    ControlRecord,
    FolderLock,
    NotRunning,
    read_record,
    write_record,
)
from p2ptrain.control.server import BODY_LIMIT_BYTES, ControlServer
from p2ptrain.errors import UserError

PLACE = LeasedIdentity("laptop", 4000, None)


class FakeMember:
    def __init__(self) -> None:
        self.removed: list[str] = []
        self.holder: str | None = None

    def status(self) -> Mapping[str, Any]:
        return {"name": "laptop", "members": []}

    def invite(self) -> str:
        return "12345678"

    def devices(self) -> Sequence[Mapping[str, Any]]:
        return [{"name": "pi", "id": "00"}]

    async def links(self) -> Sequence[Mapping[str, Any]]:
        return [{"name": "pi", "bytes_per_s": 1e7, "latency_s": 0.001}]

    def trains_for(self) -> str | None:
        return self.holder

    async def remove(self, name: str) -> None:
        if name == "ghost":
            raise UserError("no paired device is called ghost")
        self.removed.append(name)


@pytest.fixture
def member() -> FakeMember:
    return FakeMember()


@pytest.fixture
async def lender(member: FakeMember) -> Lender:
    return Lender(member)


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
async def server(
    request: pytest.FixtureRequest, tmp_path: Path, lender: Lender
) -> AsyncIterator[ControlServer]:
    async with ControlServer(tmp_path, lender, unix_socket=request.param) as server:
        yield server


@pytest.fixture
async def client(server: ControlServer, tmp_path: Path) -> AsyncIterator[ControlClient]:
    async with ControlClient(tmp_path) as client:
        yield client


async def test_questions_are_answered(client: ControlClient, member: FakeMember) -> None:
    assert await client.status() == {"name": "laptop", "members": []}
    assert await client.devices() == [{"name": "pi", "id": "00"}]
    assert await client.links() == [{"name": "pi", "bytes_per_s": 1e7, "latency_s": 0.001}]
    assert await client.invite() == "12345678"
    await client.remove("pi")
    assert member.removed == ["pi"]


async def test_the_member_s_words_reach_the_person(client: ControlClient) -> None:
    with pytest.raises(UserError, match="called ghost"):
        await client.remove("ghost")


async def test_a_member_that_is_starting_says_so(client: ControlClient, lender: Lender) -> None:
    lender.member = None
    with pytest.raises(UserError, match="starting or stopping"):
        await client.status()


async def test_a_dead_member_s_record_means_no_member(tmp_path: Path, lender: Lender) -> None:
    async with ControlServer(tmp_path, lender):
        record = read_record(tmp_path)
    write_record(tmp_path, record)  # as a killed process leaves it
    async with ControlClient(tmp_path) as client:
        with pytest.raises(NotRunning, match="p2ptrain is not running"):
            await client.status()


async def test_nothing_is_left_behind(tmp_path: Path, lender: Lender) -> None:
    async with ControlServer(tmp_path, lender, unix_socket=True):
        socket = Path(read_record(tmp_path).address)
        assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert not socket.parent.exists()
    with pytest.raises(NotRunning):
        read_record(tmp_path)


class TestStrangers:
    """S1, S24: every route refuses everyone who does not prove to be this user's own command."""

    @pytest.fixture
    async def server(self, tmp_path: Path, lender: Lender) -> AsyncIterator[ControlServer]:
        async with ControlServer(tmp_path, lender, unix_socket=False) as server:
            yield server

    @pytest.mark.parametrize(
        "change",
        [
            {"Authorization": ""},
            {"Authorization": "Bearer " + "0" * 64},
            {"Host": "evil.example:80"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
        ],
        ids=["no token", "wrong token", "rebound host", "other page", "sandboxed page"],
    )
    async def test_every_route_refuses(
        self, server: ControlServer, tmp_path: Path, change: dict[str, str], member: FakeMember
    ) -> None:
        record = read_record(tmp_path)
        headers = {"Authorization": f"Bearer {record.token}", "Host": record.address, **change}
        routes = {
            (route.method, route.resource.canonical)
            for route in server.application().router.routes()
            if route.resource is not None
        }
        assert len(routes) >= 6
        async with aiohttp.ClientSession(headers=headers) as session:
            for method, path in routes:
                url = f"http://{record.address}{path}"
                async with session.request(method, url, json={"name": "pi"}) as response:
                    assert response.status == 403, (method, path)
        assert member.removed == []

    @pytest.mark.parametrize("token", [b"Bearer \xff\xfe", "Bearer \u00e4".encode(), b"\x80" * 72])
    async def test_a_token_of_any_bytes_is_refused(
        self, server: ControlServer, tmp_path: Path, token: bytes
    ) -> None:
        """S24: as every other one, without a traceback in the log."""
        host, port = read_record(tmp_path).address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"GET /status HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Authorization: " + token + b"\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
        writer.close()

    @pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff", b"", b"7", b'{"name": {}}'])
    async def test_a_body_that_is_no_request_is_an_error_of_ours(
        self, server: ControlServer, tmp_path: Path, body: bytes
    ) -> None:
        record = read_record(tmp_path)
        headers = {"Authorization": f"Bearer {record.token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"http://{record.address}/remove", data=body) as response,
        ):
            assert response.status == 409
            assert "needs a text 'name'" in (await response.json())["error"]

    async def test_a_body_over_the_limit_is_refused(
        self, server: ControlServer, tmp_path: Path
    ) -> None:
        record = read_record(tmp_path)
        headers = {"Authorization": f"Bearer {record.token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(
                f"http://{record.address}/remove", data=b"x" * (BODY_LIMIT_BYTES + 1)
            ) as response,
        ):
            assert response.status == 413


def _is_there(path: Path) -> bool:
    return path.exists()


@pytest.fixture
def dead_pid() -> int:
    """Of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p2ptrain-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.parametrize("dead", [True, False])
async def test_what_a_killed_member_left_is_removed(
    tmp_path: Path, lender: Lender, dead_pid: int, socket_folder: Path, dead: bool
) -> None:
    pid = dead_pid if dead else os.getpid()
    write_record(tmp_path, ControlRecord(str(socket_folder / "control"), "ab" * 32, pid))
    async with ControlServer(tmp_path, lender, unix_socket=True):
        assert _is_there(socket_folder) is not dead


async def test_only_what_is_ours_is_removed(tmp_path: Path, lender: Lender, dead_pid: int) -> None:
    (tmp_path / "precious").mkdir()
    address = str(tmp_path / "precious" / "control")
    write_record(tmp_path, ControlRecord(address, "ab" * 32, dead_pid))
    async with ControlServer(tmp_path, lender):
        assert _is_there(tmp_path / "precious")


async def test_a_place_is_lent_to_one_only(
    client: ControlClient, tmp_path: Path, lender: Lender
) -> None:
    lock, stop = FolderLock(tmp_path, "join"), asyncio.Event()
    lock.take()
    asking = asyncio.create_task(client.step_aside())
    await lender.wanted.wait()
    lending = asyncio.create_task(lender.lend(PLACE, lock, stop))
    assert await asking == PLACE
    with FolderLock(tmp_path, "train"):
        async with ControlClient(tmp_path) as second:
            with pytest.raises(UserError, match="another p2ptrain"):
                await second.step_aside()
        stop.set()
        await asyncio.wait_for(lending, 10)
    assert not lender.wanted.is_set()


class _Older(ControlServer):
    """Of a release that lent its place over a connection that stayed open."""

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/step-aside", self._status)
        return app


async def test_an_older_member_is_named_as_one(tmp_path: Path, lender: Lender) -> None:
    async with _Older(tmp_path, lender), ControlClient(tmp_path) as client:
        with pytest.raises(UserError, match="another version: stop it and start it again"):
            await client.step_aside()


async def test_a_member_with_a_part_in_a_job_does_not_step_aside(
    client: ControlClient, member: FakeMember, lender: Lender
) -> None:
    member.holder = "desk"
    with pytest.raises(UserError, match=r"computing for desk's training: wait until that ends"):
        await client.step_aside()
    assert not lender.wanted.is_set()


async def test_a_running_train_does_not_step_aside(tmp_path: Path, member: FakeMember) -> None:
    async with (
        ControlServer(tmp_path, Lender(member, keeps=True)),
        ControlClient(tmp_path) as client,
    ):
        with pytest.raises(UserError, match="already runs with this state folder"):
            await client.step_aside()


async def test_a_member_that_stops_while_stepping_aside_is_reported(
    tmp_path: Path, lender: Lender
) -> None:
    server = ControlServer(tmp_path, lender)
    await server.__aenter__()
    async with ControlClient(tmp_path) as client:

        async def stop() -> None:
            await lender.wanted.wait()
            await server.__aexit__(None, None, None)

        stopping = asyncio.create_task(stop())
        with pytest.raises(UserError, match="stopped before it answered"):
            await client.step_aside()
        await stopping


async def test_a_page_of_a_member_that_is_starting(client: ControlClient) -> None:
    with pytest.raises(UserError, match="starting or stopping"):
        await client.open_page(lan=False)
