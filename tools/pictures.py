"""The documentation's pictures, of real runs: a household on the page and a terminal, a plan.

    python -m tools.pictures [--out docs/pictures]

Four devices, real processes on this machine, train the digits of `examples/digits_cnn.py`; one is
killed on the way. Chromium opens the page of the device with the data once the others have gone on:
on a screen and as a phone. The chart is that of docs/user/planning.md, by its commands. It needs
`pip install -e '.[browser,demo]'` and the system's Chromium, and takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.async_api import Browser, async_playwright, expect
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from p2ptrain.cli.commands.member_commands import state_of
from p2ptrain.cli.screen import Space, whole
from p2ptrain.control.client import ControlClient
from p2ptrain.demo.household import HouseholdPlan, train_together
from p2ptrain.mesh.trust.pairing_window import new_code
from p2ptrain.page.state import PageState

ROOT = Path(__file__).parents[1]

HOLDER = "study-desktop"

MEMBERS = ("kitchen-laptop", "attic-pc", "old-notebook")

DIES, DIES_AFTER, LOOK_AFTER = "old-notebook", 40, 120


@dataclass(frozen=True)
class Look:
    """A picture of the page.

    Attributes:
        at: what stands on top in it.
    """

    width: int
    height: int
    at: str = ".hero"  # past the pairing code


LOOKS = {
    "page": Look(1180, 774),
    "page_phone": Look(390, 844),
    "page_devices": Look(1180, 636, at="section[aria-labelledby=devices-title]"),
}

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


async def photograph_page(out: Path) -> None:
    """Train, lose a device, look."""
    script = ROOT / "examples" / "digits_cnn.py"
    with tempfile.TemporaryDirectory(prefix="pictures-") as room:
        devices = str(1 + len(MEMBERS))
        train = [str(script), "--planner", "pp", "--epochs", "500", "--wait-for", devices]
        plan = HouseholdPlan(
            *(MEMBERS, HOLDER, new_code(), Path(room), train, "127.0.0.1"),
            dies=DIES,
            dies_after=DIES_AFTER,
        )
        async with contextlib.aclosing(train_together(plan)) as bodies:
            async for body in bodies:
                if body.get("step", 0) >= LOOK_AFTER:
                    await _look(Path(room) / HOLDER, out)
                    return


async def _look(folder: Path, out: Path) -> None:
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        async with ControlClient(folder) as member:
            draw_terminal(await state_of(member), out)
            for name, look in LOOKS.items():
                address = await member.open_page(lan=False)
                await _shoot(browser, address.url, look, out / f"{name}.png")
            address = await member.open_page(lan=False)
            await _shoot_rounds(browser, address.url, out / "page_rounds.png")
        await browser.close()


def draw_terminal(state: PageState, out: Path) -> None:
    """What `p2ptrain top` shows, in letters of the reader's own."""
    console = Console(record=True, file=io.StringIO(), width=100, highlight=False, markup=False)
    console.print(whole(state, Space(100, 40)))
    fonts_of_others = re.compile(r"@font-face \{\{.*?\}\}\n", re.DOTALL)
    form = fonts_of_others.sub("", CONSOLE_SVG_FORMAT)
    console.save_svg(str(out / "terminal.svg"), title="p2ptrain top", code_format=form)


async def _shoot(browser: Browser, url: str, look: Look, file: Path) -> None:
    context = await browser.new_context(
        reduced_motion="reduce", viewport={"width": look.width, "height": look.height}
    )
    page = await context.new_page()
    await page.goto(url)
    await expect(page.locator("#live-text")).to_have_text("Live", timeout=20_000)
    await expect(page.locator("#headline")).to_contain_text("Training", timeout=20_000)
    await page.wait_for_timeout(3_000)  # some more looks at the household, for its rates
    await page.locator(look.at).evaluate("top => top.scrollIntoView()")
    await page.screenshot(path=file, animations="disabled")
    await context.close()


async def _shoot_rounds(browser: Browser, url: str, file: Path) -> None:
    """What each device did, before the predicted round, which is simulated first."""
    page = await browser.new_page(viewport={"width": 900, "height": 900}, reduced_motion="reduce")
    await page.goto(url)
    await page.locator("#rounds summary").click()
    await expect(page.locator("#rounds-picture .ghost").first).to_be_visible(timeout=60_000)
    await page.locator("#rounds").screenshot(path=file, animations="disabled")


def draw_plan(out: Path) -> None:
    """The predicted round of a pipeline for the example's household."""
    folder = ROOT / "examples" / "planning"
    files = ["--profile", str(folder / "mnist_mobilenet.json")]
    files += ["--cluster", str(folder / "household.json")]
    plan = out / "plan.json"
    _p2ptrain("plan", *files, "--batch-size", "128", "--straight", "--out", str(plan))
    _p2ptrain("simulate", *files, "--plan", str(plan), "--gantt", str(out / "plan.svg"))
    plan.unlink()


def _p2ptrain(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "p2ptrain", *words], check=True)


def main() -> None:
    """Make them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw_plan(out)
    asyncio.run(photograph_page(out))


if __name__ == "__main__":
    main()
