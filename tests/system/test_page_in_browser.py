"""The page in a real browser (Chromium, driven by Playwright): its script, its manners."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2ptrain import events
from p2ptrain.page.server import PageServer
from p2ptrain.page.source import PageSource
from tests.support.page_member import PLAN, FakePageMember, course, member, status, step

_NAMES = ("chromium", "chromium-browser", "google-chrome")

CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)

try:
    from playwright.async_api import Browser, Page, async_playwright, expect
except ImportError:
    pytest.skip("NOT TESTED: pip install -e '.[browser]'", allow_module_level=True)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED: apt install chromium")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        await chromium.close()


def _serve(folder: Path, member: FakePageMember) -> PageServer:
    return PageServer(folder, member, source=PageSource(member, look_seconds=0.05))


async def _opened(browser: Browser, page: PageServer, **look: Any) -> Page:
    context = await browser.new_context(**look)
    shown = await context.new_page()
    shown.on("pageerror", lambda error: pytest.fail(str(error)))
    await shown.goto((await page.open(lan=False)).url)
    await expect(shown.locator("#live-text")).to_have_text("Live")
    return shown


async def test_two_browsers_follow_a_job_through_a_restart(
    browser: Browser, tmp_path: Path
) -> None:
    household = FakePageMember()
    async with _serve(tmp_path, household) as page:
        wide = await _opened(browser, page)
        phone = await _opened(browser, page, viewport={"width": 360, "height": 700})
        both = (wide, phone)
        for shown in both:
            assert "token" not in shown.url
            await expect(shown.locator("#headline")).to_have_text("Nothing is being trained")
            await expect(shown.locator(".card")).to_have_count(5)
        household.job = course(PLAN, *map(step, range(1, 30)))
        for shown in both:
            await expect(shown.locator("#headline")).to_have_text("Training Net: step 29 of 100")
            await expect(shown.locator("#strip > li")).to_have_count(2)
            await expect(shown.locator(".chart")).to_have_count(2)
            wider = "document.documentElement.scrollWidth > innerWidth"
            assert not await shown.evaluate(wider)
        household.job = course(PLAN, *map(step, range(1, 31)), events.Failure("pi"))
        await expect(wide.locator("#said")).to_contain_text("Lost pi")
    await expect(wide.locator("#live-text")).to_have_text("Not connected. Trying again")
    household.job = course(PLAN, *map(step, range(1, 41)))
    async with _serve(tmp_path, household):
        for shown in both:
            await expect(shown.locator("#headline")).to_have_text(
                "Training Net: step 40 of 100", timeout=20_000
            )


async def test_by_keyboard_alone_a_device_is_removed_and_a_job_stopped(
    browser: Browser, tmp_path: Path
) -> None:
    household = FakePageMember()
    household.job = course(PLAN, *map(step, range(1, 30)))
    async with _serve(tmp_path, household) as page:
        shown = await _opened(browser, page, reduced_motion="reduce", color_scheme="dark")

        async def tab_to(label: str) -> None:
            for _ in range(40):
                await shown.keyboard.press("Tab")
                name = "(e => e.getAttribute('aria-label') ?? e.textContent.trim())"
                if await shown.evaluate(f"{name}(document.activeElement)") == label:
                    return
            pytest.fail(f"{label!r} cannot be reached by Tab")

        await tab_to("Pause")
        await shown.keyboard.press("Enter")
        household.job = replace(household.job, state="paused")
        await tab_to("Resume")
        await shown.keyboard.press("Enter")
        await tab_to("Stop")
        await shown.keyboard.press("Enter")
        await shown.keyboard.press("Escape")
        assert household.steered == ["pause", "resume"]
        await tab_to("Remove pi")
        await shown.keyboard.press("Enter")
        await tab_to("Remove")
        await shown.keyboard.press("Enter")
        await expect(shown.locator("#ask")).to_be_hidden()
        assert household.removed == ["pi" * 8]


async def test_names_are_text_and_a_large_household_stays_fluid(
    browser: Browser, tmp_path: Path
) -> None:
    household = FakePageMember()
    bold = "<img src=x onerror=alert(1)>"
    names = ["laptop", bold, *(f"device-{number}" for number in range(498))]
    household.now = status([member(name) for name in names])
    keeper = course(PLAN, *map(step, range(1, 10_001)), steps=10_000)
    household.job = replace(keeper, holder="laptop")
    async with _serve(tmp_path, household) as page:
        shown = await _opened(browser, page)
        await expect(shown.locator(".card")).to_have_count(502, timeout=20_000)
        assert await shown.locator(".card img").count() == 0
        milliseconds = await shown.evaluate(
            """async () => {
                const { Chart } = await import("/static/chart.js");
                const points = Array.from({length: 1000}, (_, i) => [i, Math.sin(i / 50)]);
                const chart = new Chart("x", String);
                document.body.append(chart.node);
                const begin = performance.now();
                chart.show(points, null, null);
                const seen = performance.now() - begin;
                chart.node.remove();
                return seen;
            }"""
        )
        assert milliseconds < 500
