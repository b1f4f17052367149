"""`p2ptrain page` asks the member that runs here, and says where the page is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from p2ptrain.cli.main import main
from p2ptrain.control.lease import Lender, PageAddress
from p2ptrain.control.server import ControlServer

HERE, LAN = "http://127.0.0.1:1/?token=a", "http://10.0.0.2:1/?token=b"


class _FakePage:
    def __init__(self) -> None:
        self.is_open = False

    async def state(self) -> object:
        return None

    async def open(self, *, lan: bool, photos: Path | None = None) -> PageAddress:
        self.is_open, self.photos = True, photos
        return PageAddress(HERE, LAN if lan else None)

    async def close(self) -> None:
        self.is_open = False


async def test_addresses_are_printed_and_the_page_is_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lender, page = Lender(), _FakePage()
    lender.page = page

    async def asked(*arguments: str) -> str:
        argv = ["page", *arguments, "--state-dir", str(tmp_path)]
        assert await asyncio.to_thread(main, argv) == 0
        return capfd.readouterr().out

    async with ControlServer(tmp_path, lender):
        assert HERE in await asked()
        assert json.loads(await asked("--json")) == {"event": "page", "url": HERE}
        both = json.loads(await asked("--lan", "--json"))
        assert both == {"event": "page", "url": LAN, "local_url": HERE}
        assert page.is_open
        assert page.photos is None
        said = await asked("--lan", "--photos", "~/some fruit & more")
        assert page.photos == Path.home() / "some fruit & more"
        assert f"Pictures go to {page.photos}" in said
        assert f"to add pictures: {LAN}" in said
        assert json.loads(await asked("--close", "--json")) == {"event": "page_closed"}
        assert not page.is_open


def test_what_closes_the_page_takes_no_pictures(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["page", "--close", "--photos", "x", "--state-dir", str(tmp_path)]) == 2
    assert "leave out --photos" in capfd.readouterr().err


def test_without_a_member_it_says_what_to_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["page", "--state-dir", str(tmp_path)]) == 1
    assert "Start it: p2ptrain join" in capfd.readouterr().err
