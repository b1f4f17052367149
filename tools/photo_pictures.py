"""The documentation's picture of `/add`, of a real run: a phone's browser, three devices.

    python -m tools.photo_pictures [--out docs/pictures]

Chromium, as wide as a phone, opens the address that `p2ptrain page --photos` gives, chooses drawn
circles and squares, sorts them by tap, one of them wrongly, and sends them to the device that runs
`join`. Three devices then train `examples/photos.py` on that folder, real processes on this
machine, and the wrong label is corrected where the page shows it. It needs
`pip install -e '.[browser]' pillow` and the system's Chromium, and takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.async_api import Browser, Page, async_playwright, expect

from p2ptrain.control.client import ControlClient
from p2ptrain.demo.device_process import DeviceProcess
from p2ptrain.demo.household import ENVIRONMENT, HouseholdPlan, train_together
from p2ptrain.errors import UserError
from p2ptrain.mesh.trust.pairing_window import new_code
from tools.pictures import CHROMIUM, ROOT

HOLDER, MEMBERS = "study-desktop", ("kitchen-laptop", "attic-pc")

LABELS = ("circle", "square")

A_LABEL = 60

LOOK_AFTER_EVALUATIONS = 25


async def photograph(out: Path) -> None:
    """Add, train, correct."""
    with tempfile.TemporaryDirectory(prefix="photos-") as name:
        room = Path(name)
        drawn = [file for label in LABELS for file in draw(room / "phone", label)]
        train = [str(ROOT / "examples" / "photos.py"), "-o", f"folder={room / 'shapes'}"]
        train += ["--planner", "pp", "--wait-for", str(1 + len(MEMBERS))]
        plan = HouseholdPlan(MEMBERS, HOLDER, new_code(), room, train, "127.0.0.1")
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
            holder = await DeviceProcess.start(
                HOLDER, ["join", *plan.arguments(HOLDER)], environment=ENVIRONMENT
            )
            try:
                phone = await opened(browser, room)
                await add(phone, drawn, out / "photos.png")
                await train_and_correct(plan, phone, out / "photos_doubts.png")
            finally:
                await holder.stop()
            await browser.close()


def draw(folder: Path, label: str) -> list[Path]:
    """Pictures as a phone might have them, of one shape in any colour."""
    folder.mkdir(exist_ok=True)
    files, chance = [], random.Random(label)
    for number in range(A_LABEL):
        image = Image.new("RGB", (1280, 960), tuple(chance.randrange(40, 140) for _ in range(3)))
        side = chance.randrange(320, 640)
        x, y = chance.randrange(1280 - side), chance.randrange(960 - side)
        paint = ImageDraw.Draw(image)
        form = paint.ellipse if label == "circle" else paint.rectangle
        form((x, y, x + side, y + side), fill=tuple(chance.randrange(150, 256) for _ in range(3)))
        files.append(folder / f"{label}-{number}.jpg")
        image.save(files[-1], quality=90)
    return files


async def opened(browser: Browser, room: Path) -> Page:
    """The page, as its address opens it."""
    while True:
        try:
            async with ControlClient(room / HOLDER) as member:
                address = await member.open_page(lan=False, photos=room / "shapes")
        except UserError:  # it is starting
            await asyncio.sleep(0.5)
        else:
            break
    context = await browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    phone = await context.new_page()
    phone.set_default_timeout(120_000)
    await phone.goto(address.url)
    return phone


async def add(phone: Page, drawn: list[Path], picture: Path) -> None:
    """The last squares are called circles by mistake."""
    await phone.locator("#files").set_input_files(drawn)
    tiles = phone.locator("#tiles .tile")
    await expect(tiles).to_have_count(len(drawn), timeout=240_000)
    for label in LABELS:
        await phone.locator("#label-name").fill(label)
        await phone.get_by_role("button", name="Add", exact=True).click()
        if label == "circle":
            for at in (*range(A_LABEL), *range(2 * A_LABEL - 10, 2 * A_LABEL)):
                await tiles.nth(at).tap()
    await tiles.nth(A_LABEL).tap()
    await phone.locator("#sort").evaluate("sort => sort.scrollIntoView()")
    await phone.screenshot(path=picture)
    await phone.locator("#rest").tap()
    await phone.locator("#upload").tap()
    await expect(phone.locator("#sent")).to_contain_text("added on", timeout=120_000)
    print("upload:", await phone.locator("#sent").inner_text())


async def train_and_correct(plan: HouseholdPlan, phone: Page, picture: Path) -> None:
    """Look while it trains, at the same address: the page has gone from `join` to `train`."""
    evaluations = 0
    async with contextlib.aclosing(train_together(plan)) as bodies:
        async for body in bodies:
            if body["event"] in ("plan", "done", "error"):
                print(body["event"], [s["devices"] for s in body.get("stages", ())], body)
            if body["event"] != "eval":
                continue
            evaluations += 1
            print("eval", body["step"], body["metrics"])
            if evaluations == LOOK_AFTER_EVALUATIONS:
                await correct(phone, picture)


async def correct(phone: Page, picture: Path) -> None:
    """The circle that the network finds likeliest to be a square is one."""
    doubted = phone.locator("#doubted .tile", has_text="rather square").first
    await doubted.wait_for()
    await phone.locator("#doubts").evaluate("doubts => doubts.scrollIntoView()")
    await phone.wait_for_timeout(1_000)  # for its pictures
    await phone.screenshot(path=picture)
    print("doubted:", await doubted.get_attribute("aria-label"))
    await doubted.tap()
    await phone.locator("#ask").get_by_role("button", name="square", exact=True).tap()
    await expect(phone.locator("#moved")).to_contain_text("The next training uses that")


def main() -> None:
    """Make both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    asyncio.run(photograph(out))


if __name__ == "__main__":
    main()
