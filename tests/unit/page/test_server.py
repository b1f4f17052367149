"""The page over real sockets: who is let in, what it shows, what it does, what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from p2ptrain import events
from p2ptrain.errors import UserError
from p2ptrain.page import server as page_server
from p2ptrain.page.server import PAGE_FILE, PageServer, ServerLimits
from p2ptrain.page.sessions import Reach
from p2ptrain.page.site import Mount
from p2ptrain.page.source import PageSource
from tests.support.page_member import PLAN, FakePageMember, course, step


@pytest.fixture
def member() -> FakePageMember:
    return FakePageMember()


@asynccontextmanager
async def _served(
    folder: Path, member: FakePageMember, silent_seconds: float = 60.0
) -> AsyncIterator[PageServer]:
    source = PageSource(member, look_seconds=0.01, fresh_seconds=0.0)
    limits = ServerLimits(silent_seconds=silent_seconds)
    async with PageServer(folder, member, source=source, limits=limits) as page:
        yield page


@pytest.fixture
async def page(tmp_path: Path, member: FakePageMember) -> AsyncIterator[PageServer]:
    async with _served(tmp_path, member) as page:
        yield page


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    jar = aiohttp.CookieJar(unsafe=True)  # of addresses too
    timeout = aiohttp.ClientTimeout(total=20.0)
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=timeout) as session:
        yield session


async def _let_in(page: PageServer, browser: aiohttp.ClientSession) -> str:
    """The page's origin, with a cookie for it in the browser."""
    url = (await page.open(lan=False)).url
    async with browser.get(url) as answer:
        assert answer.status == 200
        assert "page.js" in await answer.text()
    return str(URL(url).origin())


async def _json(browser: aiohttp.ClientSession, url: str) -> Any:
    async with browser.get(url) as answer:
        assert answer.status == 200
        return await answer.json()


async def _post(browser: aiohttp.ClientSession, origin: str, path: str, body: Any) -> Any:
    headers = {"Origin": origin}
    async with browser.post(origin + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


class _Reader:
    """The events of a stream."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self) -> tuple[str, str, Any]:
        fields: dict[str, str] = {}
        while True:
            line = (await self._answer.content.readline()).decode().rstrip("\n")
            if line:
                key, _, value = line.partition(": ")
                fields[key] = value
            elif "data" in fields and "id" in fields:
                return fields["event"], fields["id"], json.loads(fields["data"])
            else:
                fields = {}


async def test_a_token_lets_one_browser_in_and_its_cookie_outlives_the_member(
    tmp_path: Path, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    async with _served(tmp_path, member) as page:
        url = (await page.open(lan=False)).url
        async with browser.get(url) as answer:
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
        async with aiohttp.ClientSession() as other, other.get(url) as answer:
            assert answer.status == 403  # it counts once
        origin = str(URL(url).origin())
        assert (await _json(browser, f"{origin}/state"))["household"]["name"] == "laptop"
    async with _served(tmp_path, member):
        assert (await _json(browser, f"{origin}/state"))["household"]["name"] == "laptop"
    async with _served(tmp_path, member) as page:
        await page.close()
        origin = str(URL((await page.open(lan=False)).url).origin())  # the usual port may be taken
        async with browser.get(f"{origin}/state") as answer:
            assert answer.status == 403  # closed is closed, for those who were let in too
    assert (tmp_path / PAGE_FILE).stat().st_mode & 0o077 == 0


def _routes(page: PageServer) -> list[tuple[str, str]]:
    """Every route that the server has, so that none is added without a thought."""
    (listening,) = page._listening.values()
    assert listening.runner.app is not None
    found = [(r.method, r.resource.canonical) for r in listening.runner.app.router.routes()]
    return [(method, path.replace("{name}", "page.js")) for method, path in found]


_FOREIGN: list[dict[str, str]] = [
    {"Host": "evil.example"},
    {"Host": "127.0.0.1"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
]


async def test_no_route_answers_strangers_or_other_sites(
    page: PageServer, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    origin = await _let_in(page, browser)
    routes = _routes(page)
    assert len(routes) >= 8
    async with aiohttp.ClientSession() as stranger:
        for method, path in routes:
            headers = {"Origin": origin}
            async with stranger.request(method, origin + path, json={}, headers=headers) as answer:
                assert answer.status == 403, (method, path)
            for foreign in _FOREIGN:
                own = {} if "Origin" in foreign else {"Origin": origin}
                asked = browser.request(method, origin + path, json={}, headers={**own, **foreign})
                async with asked as answer:
                    assert answer.status == 403, (method, path, foreign)
    async with browser.post(f"{origin}/api/invite", json={}) as answer:
        assert answer.status == 403  # without an Origin
    async with browser.post(f"{origin}/api/invite", data="x", headers={"Origin": origin}) as answer:
        assert answer.status == 403  # a form's
    assert member.window is None


async def test_a_link_from_another_site_opens_the_page(
    page: PageServer, browser: aiohttp.ClientSession
) -> None:
    origin = await _let_in(page, browser)
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    async with browser.get(origin, headers={**link, "Sec-Fetch-Dest": "document"}) as answer:
        assert answer.status == 200


async def test_guesses_are_cut_short_and_bodies_are_small(
    page: PageServer, browser: aiohttp.ClientSession
) -> None:
    origin = await _let_in(page, browser)
    async with aiohttp.ClientSession() as guesser:
        statuses = []
        for number in range(12):
            async with guesser.get(f"{origin}/?token={number}") as answer:
                statuses.append(answer.status)
    assert statuses == [403] * 10 + [429] * 2
    big = {"name": "x" * 20_000}
    headers = {"Origin": origin}
    async with browser.post(f"{origin}/api/remove", json=big, headers=headers) as answer:
        assert answer.status == 413


async def test_the_stream_follows_what_happens(
    page: PageServer, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    origin = await _let_in(page, browser)
    async with browser.get(f"{origin}/events") as answer:
        assert answer.content_type == "text/event-stream"
        reader = _Reader(answer)
        kind, first, state = await reader.next()
        assert kind == "state"
        assert "job" not in state
        assert state == await _json(browser, f"{origin}/state")
        member.job = course(PLAN, step(1), step(2))
        kind, _, changed = await reader.next()
        assert kind == "change"
        assert changed["job"]["headline"] == "Training Net: step 2 of 100"
        member.job = course(PLAN, step(1), step(2), step(3))
        while "more" not in changed:
            _, last, changed = await reader.next()
        assert [point[0] for point in changed["more"]["points"]] == [3]
        assert last != first
        member.happened.put_nowait(events.Member("pi", "left"))
        while "notes" not in changed:
            _, _, changed = await reader.next()
        assert changed["notes"][-1]["text"] == "pi has left"


async def test_what_can_be_done_is_done_and_errors_reach_the_person(
    page: PageServer, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    origin = await _let_in(page, browser)
    member.job = course(PLAN, step(1))
    assert await _post(browser, origin, "/api/invite", {}) == (200, {})
    assert (await _json(browser, f"{origin}/state"))["pairing"]["code"] == "31415926"
    assert await _post(browser, origin, "/api/remove", {"name": "pi"}) == (200, {})
    assert member.removed == ["pi"]
    status, body = await _post(browser, origin, "/api/remove", {"name": "ghost"})
    assert (status, body["error"]) == (409, "no paired device is called ghost")
    for wrong in ({}, [], {"name": 3}):
        status, body = await _post(browser, origin, "/api/remove", wrong)
        assert (status, body["error"]) == (409, "the request needs a text 'name'")
    for action in ("pause", "resume", "stop"):
        status, _ = await _post(browser, origin, f"/api/{action}", {"run": "an earlier one"})
        assert status == 409
        assert await _post(browser, origin, f"/api/{action}", {"run": "r1"}) == (200, {})
    assert member.steered == ["pause", "resume", "stop"]


async def test_metrics_for_a_browser_and_for_a_scraper(
    tmp_path: Path, page: PageServer, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    member.job = course(PLAN, step(7))
    origin = await _let_in(page, browser)
    async with browser.get(f"{origin}/metrics") as answer:
        text = await answer.text()
    assert 'p2ptrain_job_step{model="Net",holder="laptop"} 7\n' in text
    token = (tmp_path / "page_metrics_token").read_text()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as scraper:
        async with scraper.get(f"{origin}/metrics") as answer:
            assert await answer.text() == text
        async with scraper.get(f"{origin}/state") as answer:
            assert answer.status == 403  # it lets nobody in elsewhere


async def test_a_taken_port_is_avoided(
    tmp_path: Path, page: PageServer, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    first = URL((await page.open(lan=False)).url)
    async with _served(tmp_path / "second", member) as second:
        assert URL((await second.open(lan=False)).url).port != first.port


async def test_rounds_and_advice_are_asked_for_once_for_all_browsers(
    page: PageServer, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    origin = await _let_in(page, browser)
    assert (await _json(browser, f"{origin}/rounds"))["rounds"] == []
    asked = await asyncio.gather(*(_json(browser, f"{origin}/advice") for _ in range(4)))
    assert [answer["points"][0]["text"] for answer in asked] == ["without pi: 60% slower"] * 4
    assert member.explained == 1


async def test_the_network_looks_and_changes_nothing(
    page: PageServer,
    member: FakePageMember,
    browser: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="has no network"):
        await page.open(lan=True)
    monkeypatch.setattr(page_server, "_is_loopback", lambda address: False)
    member.now = member.now.__class__(**{**vars(member.now), "address": "127.0.0.2"})
    member.invite()
    url = (await page.open(lan=True)).lan_url
    assert url is not None
    async with browser.get(url) as answer:
        assert answer.status == 200
    origin = str(URL(url).origin())
    state = await _json(browser, f"{origin}/state")
    assert not state["household"]["may_change"]
    assert "pairing" not in state
    async with browser.get(f"{origin}/advice") as answer:
        assert answer.status == 403
    assert (await _json(browser, f"{origin}/rounds"))["rounds"] == []
    for path in (
        "/api/invite",
        "/api/start",
        "/api/remove",
        "/api/pause",
        "/api/resume",
        "/api/stop",
    ):
        headers = {"Origin": origin}
        async with browser.post(origin + path, json={}, headers=headers) as answer:
            assert answer.status == 403


async def test_silent_strangers_are_cut_off_and_browsers_are_not(
    tmp_path: Path, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    async with _served(tmp_path, member, silent_seconds=0.2) as page:
        origin = URL(await _let_in(page, browser))
        assert origin.host is not None
        async with browser.get(origin / "events") as answer:
            reader = _Reader(answer)
            await reader.next()
            stranger, writer = await asyncio.open_connection(origin.host, origin.port)
            writer.write(b"GET / HTTP/1.1\r\n")
            assert await asyncio.wait_for(stranger.read(), 10.0) == b""
            writer.close()
            member.job = course(step(1))
            while (await reader.next())[0] != "change":
                pass


def test_the_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    folder = Path(page_server.__file__).parent / "static"
    files = {file.name: file.read_text("utf-8") for file in folder.iterdir()}
    assert sum(len(text.encode()) for text in files.values()) < 250_000
    for name, text in files.items():
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert "innerHTML" not in text, name
    assert not re.search(r"<script(?![^>]* src=)|style=|\son\w+=", files["page.html"])


async def test_another_rooms_routes_stand_behind_the_same_checks(
    tmp_path: Path, member: FakePageMember, browser: aiohttp.ClientSession
) -> None:
    taken: list[bytes] = []

    async def shown(request: web.Request) -> web.Response:
        return web.Response(text="add pictures")

    async def take(request: web.Request) -> web.Response:
        taken.append(await request.content.read(9))
        return web.json_response({})

    def add_routes(router: web.UrlDispatcher, reach: Reach) -> None:
        router.add_get("/add", shown)
        router.add_post("/add/picture", take)

    mount = Mount("/add", add_routes, frozenset({"image/jpeg"}))
    async with PageServer(tmp_path, member, mounts=[mount]) as page:
        url = (await page.open(lan=False, path="/add")).url
        async with browser.get(url) as answer:
            assert await answer.text() == "add pictures"
        origin = str(URL(url).origin())
        own = {"Origin": origin}
        picture = f"{origin}/add/picture"
        for kind, expected in (("image/jpeg", 200), ("application/json", 403)):
            headers = {**own, "Content-Type": kind}
            async with browser.post(picture, data=b"a picture", headers=headers) as answer:
                assert answer.status == expected
        headers = {"Origin": "http://evil.example", "Content-Type": "image/jpeg"}
        async with browser.post(picture, data=b"theirs", headers=headers) as answer:
            assert answer.status == 403
        async with aiohttp.ClientSession() as stranger:
            headers = {**own, "Content-Type": "image/jpeg"}
            async with stranger.post(picture, data=b"theirs", headers=headers) as answer:
                assert answer.status == 403
    assert taken == [b"a picture"]
