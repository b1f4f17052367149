"""`/add` over real sockets: who may send, what comes to lie where, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from p2ptrain.errors import UserError
from p2ptrain.page.server import PageServer
from p2ptrain.photos import server as photo_server
from p2ptrain.photos.folder import PhotoFolder, PhotoLimits
from p2ptrain.photos.server import PHOTOS_FILE, PhotoPage, PhotoRoutes, UploadSettings
from p2ptrain.photos.uncertain import UncertainPicture, UncertainPictures, write_uncertain
from tests.support.page_member import FakePageMember
from tests.support.pictures import picture

JPEG = {"Content-Type": "image/jpeg"}


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    jar = aiohttp.CookieJar(unsafe=True)  # of addresses too
    timeout = aiohttp.ClientTimeout(total=20.0)
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=timeout) as session:
        yield session


class _Browser:
    """One that was let in."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.origin = str(URL(url).origin())

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        headers = {"Origin": self.origin, **more.pop("headers", {})}
        asked = self.session.request(method, self.origin + path, headers=headers, **more)
        async with asked as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def send(self, label: str, content: Any, **headers: str) -> tuple[int, Any]:
        more = {"params": {"label": label}, "data": content, "headers": {**JPEG, **headers}}
        return await self.ask("PUT", "/add/picture", **more)


async def _let_in(session: aiohttp.ClientSession, url: str) -> _Browser:
    async with session.get(url) as answer:
        assert answer.status == 200
    return _Browser(session, url)


@pytest.fixture
async def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PhotoPage]:
    def roomy(path: Path) -> PhotoFolder:
        return PhotoFolder(path, PhotoLimits(picture_bytes=100_000, free_bytes=0))

    monkeypatch.setattr(photo_server, "PhotoFolder", roomy)  # this machine's disk may be full
    async with PhotoPage(tmp_path / "state", FakePageMember()) as page:
        yield page


async def test_pictures_come_into_the_chosen_folder_and_labels_are_corrected(
    tmp_path: Path, page: PhotoPage, browser: aiohttp.ClientSession
) -> None:
    fruit = tmp_path / "fruit"
    url = (await page.open(lan=False, photos=fruit)).url
    assert URL(url).path == "/add"
    phone = await _let_in(browser, url)
    status, added = await phone.send("Äpfel & co", picture(1))
    assert (status, added["label"], added["is_new"]) == (200, "Äpfel & co", True)
    named = await phone.ask("GET", "/add/label", params={"text": " äpfel  & CO"})
    assert named == (200, {"label": "Äpfel & co"})
    assert await phone.ask("GET", "/add/label", params={"text": "a/b"}) == (
        409,
        {"error": "that cannot be a label: it has a /, which no folder can have everywhere"},
    )
    both = await asyncio.gather(*(phone.send("pears", picture(2)) for _ in range(6)))
    assert sum(body["is_new"] for _, body in both) == 1
    assert (fruit / "Äpfel & co" / added["file"]).read_bytes() == picture(1)
    doubt = UncertainPicture("Äpfel & co", added["file"], "pears", 0.25)
    write_uncertain(fruit, UncertainPictures(40, 9, (doubt,)))
    _, state = await phone.ask("GET", "/add/state")
    assert state["device"] == "laptop"
    assert state["folder"] == str(fruit)
    assert {label["name"]: label["pictures"] for label in state["labels"]} == {
        "Äpfel & co": 1,
        "pears": 1,
    }
    assert state["uncertain"]["step"] == 40
    assert state["uncertain"]["pictures"][0]["guess"] == "pears"
    where = {"label": "Äpfel & co", "file": added["file"]}
    async with browser.get(f"{phone.origin}/add/picture", params=where) as answer:
        assert (answer.content_type, await answer.read()) == ("image/jpeg", picture(1))
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    moved = await phone.ask("POST", "/add/move", json={**where, "to": "pears"})
    assert moved == (200, {"label": "pears"})
    async with browser.get(f"{phone.origin}/add/picture", params=where) as answer:
        assert answer.status == 404
    assert len(list((fruit / "pears").iterdir())) == 2
    for wrong in ([], {}, {**where, "to": "a/b"}, {**where, "to": 3}):
        status, body = await phone.ask("POST", "/add/move", json=wrong)
        assert status == 409
        assert body["error"]


async def test_what_is_no_picture_or_no_label_is_refused_and_leaves_nothing(
    tmp_path: Path, page: PhotoPage, browser: aiohttp.ClientSession
) -> None:
    async def drip() -> AsyncIterator[bytes]:  # no Content-Length
        for _ in range(8):
            yield bytes(50_000)

    phone = await _let_in(browser, (await page.open(lan=False, photos=tmp_path / "fruit")).url)
    for label, content, why in [
        ("apples", b"", "an empty file"),
        ("apples", b"<html>", "no picture"),
        ("apples", b"\0\0\0\x18ftypheic" + bytes(9), "HEIC"),
        ("apples", picture(1)[:-9], "not whole"),
        ("apples", picture(1) + bytes(100_000), "at most"),
        ("apples", drip(), "at most"),
        ("../apples", picture(1), "cannot be a label"),
        (".apples", picture(1), "cannot be a label"),
        ("", picture(1), "it is empty"),
    ]:
        status, body = await phone.send(label, content)
        assert status == 409
        assert why in body["error"], label
    assert list((tmp_path / "fruit").iterdir()) == []


async def test_strangers_and_other_sites_add_nothing(
    tmp_path: Path, page: PhotoPage, browser: aiohttp.ClientSession
) -> None:
    fruit = tmp_path / "fruit"
    phone = await _let_in(browser, (await page.open(lan=False, photos=fruit)).url)
    _, added = await phone.send("apples", picture(1))
    foreign = [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data"},
    ]
    for headers in foreign:
        status, _ = await phone.send("apples", picture(2), **headers)
        assert status == 403, headers
    async with aiohttp.ClientSession() as session:
        stranger = _Browser(session, phone.origin)
        assert (await stranger.send("apples", picture(2)))[0] == 403
        move = {"label": "apples", "file": added["file"], "to": "pears"}
        assert (await stranger.ask("POST", "/add/move", json=move))[0] == 403
        for path in ("/add", "/add/state", f"/add/picture?label=apples&file={added['file']}"):
            assert (await stranger.ask("GET", path))[0] == 403
    assert len(list(fruit.rglob("*.jpg"))) == 1


async def test_the_folder_outlives_the_member_until_the_page_is_closed(
    tmp_path: Path, browser: aiohttp.ClientSession
) -> None:
    state, fruit = tmp_path / "state", tmp_path / "fruit"
    async with PhotoPage(state, FakePageMember()) as page:
        phone = await _let_in(browser, (await page.open(lan=False)).url)
        _, shown = await phone.ask("GET", "/add/state")
        assert shown["folder"] is None
        assert "p2ptrain page --lan --photos DIR" in shown["why"]
        status, body = await phone.send("apples", picture(1))
        assert (status, body["error"]) == (409, shown["why"])
        for wrong, why in [(state, "keys"), (tmp_path, "keys"), (tmp_path / "a" / "b", "No such")]:
            with pytest.raises(UserError, match=why):
                await page.open(lan=False, photos=wrong)
        await page.open(lan=False, photos=fruit)
    async with PhotoPage(state, FakePageMember()) as page:
        _, shown = await phone.ask("GET", "/add/state")
        assert shown["folder"] == str(fruit)
        await page.close()
    assert not (state / PHOTOS_FILE).exists()
    (state / PHOTOS_FILE).write_text("{")
    async with PhotoPage(state, FakePageMember()) as page:  # a damaged file is only said
        await page.open(lan=False)


async def test_a_picture_that_stalls_is_let_go_and_others_pass_it(
    tmp_path: Path, browser: aiohttp.ClientSession
) -> None:
    settings = UploadSettings(piece_seconds=0.2, at_once=2, waiting=1)
    routes = PhotoRoutes(lambda: "laptop", settings)
    routes.folder = PhotoFolder(tmp_path / "fruit", PhotoLimits(free_bytes=0))
    held = asyncio.Event()

    async def stall() -> AsyncIterator[bytes]:
        yield picture(1)[:100]
        await held.wait()

    page = PageServer(tmp_path / "state", FakePageMember(), mounts=[routes.mount()])
    async with page:
        phone = await _let_in(browser, (await page.open(lan=False)).url)
        stalled = [asyncio.create_task(phone.send("apples", stall())) for _ in range(4)]
        done = [await one for one in asyncio.as_completed(stalled)]
        errors = sorted(body["error"] for _, body in done)
        assert "did not come in time" in errors[0]
        assert "too many pictures come at once" in errors[-1]
        assert (await phone.send("apples", picture(1)))[0] == 200
        held.set()
    assert len(list((tmp_path / "fruit").rglob("*"))) == 2
