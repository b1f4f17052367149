"""Pictures added from a phone's browser (Chromium, driven by Playwright), 390 pixels wide."""

from __future__ import annotations

import os
import shutil
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from p2ptrain.photos.folder import PhotoFolder
from p2ptrain.photos.server import PhotoPage
from p2ptrain.photos.uncertain import UncertainPicture, UncertainPictures, write_uncertain
from tests.support.page_member import FakePageMember
from tests.support.pictures import picture

_NAMES = ("chromium", "chromium-browser", "google-chrome")

CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)

try:
    from axe_playwright_python.async_playwright import Axe
    from playwright.async_api import Page, async_playwright, expect
except ImportError:
    pytest.skip("NOT TESTED: pip install -e '.[browser]'", allow_module_level=True)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED: apt install chromium")


def _taken(turned: int) -> bytes:
    """As a phone keeps it: large, turned by its EXIF, which also has a place."""
    image = Image.new("RGB", (1600, 1200), "navy")
    image.paste("gold", (0, 0, 1600, 300))  # above, once it is upright
    exif = Image.Exif()
    exif[0x0112] = turned
    exif.get_ifd(0x8825)[2] = (47.0, 22.0, 30.0)
    if turned == 6:  # a quarter to the right makes it upright
        image = image.rotate(90, expand=True)
    blob = BytesIO()
    image.save(blob, "JPEG", exif=exif)
    return blob.getvalue()


def _is_like(folder: Path) -> list[tuple[str, str]]:
    """As torchvision's ImageFolder finds classes and samples."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    found = [(name, file) for name in classes for file in sorted(os.listdir(folder / name))]
    assert {name for name, _ in found} == set(classes), "ImageFolder refuses an empty class"
    return [pair for pair in found if pair[1].lower().endswith((".jpg", ".png", ".webp"))]


async def _has_no_serious_findings(shown: Page) -> None:
    found = (await Axe().run(shown)).response["violations"]
    assert [one for one in found if one["impact"] in ("serious", "critical")] == []


async def test_pictures_are_chosen_labelled_sent_and_corrected(tmp_path: Path) -> None:
    fruit = tmp_path / "fruit"
    files = [
        {"name": "upright.jpg", "mimeType": "image/jpeg", "buffer": _taken(1)},
        {"name": "turned.jpg", "mimeType": "image/jpeg", "buffer": _taken(6)},
        {"name": "see-through.png", "mimeType": "image/png", "buffer": picture(3, kind="PNG")},
        {"name": "IMG_1.HEIC", "mimeType": "image/heic", "buffer": b"\0\0\0\x18ftypheic" * 9},
    ]
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    async with (
        PhotoPage(tmp_path / "state", FakePageMember()) as page,
        async_playwright() as playwright,
    ):
        url = (await page.open(lan=False, photos=fruit)).url
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        context = await chromium.new_context(
            viewport={"width": 390, "height": 844}, device_scale_factor=2, color_scheme="dark"
        )
        shown = await context.new_page()
        wrong: list[str] = []
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        await shown.goto(url)
        await expect(shown.locator("#folder")).to_have_text(str(fruit))
        await expect(shown.locator("#device")).to_have_text("laptop")

        await shown.locator("#files").set_input_files(files)
        await expect(shown.locator("#read")).to_contain_text("cannot read IMG_1.HEIC")
        await expect(shown.locator("#read")).to_contain_text("Most Compatible")
        tiles = shown.locator("#tiles .tile")
        await expect(tiles).to_have_count(3)
        await tiles.first.click()
        await expect(shown.locator("#sent")).to_have_text("Add a label first.")
        for label in ("gold", "gold/green", "Äpfel"):
            await shown.locator("#label-name").fill(label)
            await shown.get_by_role("button", name="Add", exact=True).click()
            if "/" in label:  # which is no folder's name
                await expect(shown.locator("#sent")).to_contain_text("it has a /")
            else:
                await expect(shown.locator("#labels")).to_contain_text(label)
        await tiles.nth(2).click()  # the label that was added last is the one that a tap gives
        await shown.get_by_role("button", name="gold", exact=True).click()
        await shown.get_by_role("button", name="The other 2: gold").click()
        await _has_no_serious_findings(shown)
        wider = "document.documentElement.scrollWidth > innerWidth"
        assert not await shown.evaluate(wider)

        (fruit / "Äpfel").touch()
        await shown.get_by_role("button", name="Upload 3 pictures").click()
        refused = shown.locator(".tile[data-state=failed]")
        await expect(refused).to_contain_text("is a file, so it cannot be a label")
        await expect(shown.locator("#sent")).to_contain_text("2 pictures added on laptop.")
        assert [name for name, _ in _is_like(fruit)] == ["gold", "gold"]
        (fruit / "Äpfel").unlink()
        await shown.get_by_role("button", name="Upload 1 picture").click()
        await expect(shown.locator("#sent")).to_contain_text("1 picture added on laptop.")
        assert [name for name, _ in _is_like(fruit)] == ["gold", "gold", "Äpfel"]
        for _, file in _is_like(fruit)[:2]:
            with Image.open(fruit / "gold" / file) as image:
                assert image.size == (640, 480)
                assert not image.getexif()
                red, _, blue = ImageOps.exif_transpose(image).getpixel((320, 40))
                assert red > 200 > 100 > blue, "gold is above"

        (_, file), _, _ = _is_like(fruit)
        doubt = UncertainPicture("gold", file, "Äpfel", 0.125)
        write_uncertain(fruit, UncertainPictures(40, 3, (doubt,)))
        doubted = shown.get_by_role("button", name="Labelled gold.")
        await expect(doubted).to_contain_text("13% gold, rather Äpfel", timeout=20_000)
        await doubted.click()
        await _has_no_serious_findings(shown)
        await shown.locator("#ask").get_by_role("button", name="Äpfel", exact=True).click()
        await expect(shown.locator("#moved")).to_contain_text("The next training uses that")
        await expect(doubted).to_have_count(0)
        assert (fruit / "Äpfel" / file).exists()
        counts = {label.name: label.pictures for label in PhotoFolder(fruit).labels()}
        assert counts == {"gold": 1, "Äpfel": 2}
        await _has_no_serious_findings(shown)
        await chromium.close()
    assert [text for text in wrong if "409" not in text] == []
