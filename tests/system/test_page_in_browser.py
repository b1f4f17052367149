"""The page in a real browser (Chromium, driven by Playwright): its script, its manners."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from p2ptrain import events
from p2ptrain.page.server import PageServer
from p2ptrain.page.source import PageSource
from p2ptrain.plan.round_picture import Bar, PredictedRound, RoundPicture
from tests.support.page_member import PLAN, FakePageMember, course, member, status, step

_NAMES = ("chromium", "chromium-browser", "google-chrome")

CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)

try:
    from axe_playwright_python.async_playwright import Axe
    from playwright.async_api import Browser, Page, async_playwright, expect
except ImportError:
    pytest.skip("NOT TESTED: pip install -e '.[browser]'", allow_module_level=True)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED: apt install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

PICTURE = RoundPicture(
    devices=("desk", "laptop", "pi"),
    seconds=2.0,
    rounds=(7, 8),
    starts=(0.0, 1.0),
    bars=(Bar(0, 0, 0.0, 0.5), Bar(0, 6, 0.5, 2.0), Bar(2, 1, 0.5, 1.5), Bar(1, 4, 0.4, 0.6)),
    predicted=PredictedRound(1.0, (Bar(0, 0, 0.0, 0.4), Bar(2, 1, 0.4, 0.9))),
)


_errors: list[str] = []


@pytest.fixture(autouse=True)
def no_script_fails() -> Iterator[None]:
    _errors.clear()
    yield
    assert not _errors


@pytest_asyncio.fixture(scope="module", loop_scope="module")
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
    shown.on("pageerror", lambda error: _errors.append(str(error)))
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

        async def pressed(path: str) -> None:
            async with shown.expect_response(f"**{path}"):
                await shown.keyboard.press("Enter")

        await tab_to("Pause")
        await pressed("/api/pause")
        household.job = replace(household.job, state="paused")
        await expect(shown.get_by_role("button", name="Resume")).to_be_visible()
        await tab_to("Resume")
        await pressed("/api/resume")
        await tab_to("Stop")
        await shown.keyboard.press("Enter")
        await shown.keyboard.press("Escape")
        assert household.steered == ["pause", "resume"]
        await tab_to("Remove pi")
        await shown.keyboard.press("Enter")
        await tab_to("Remove")
        await pressed("/api/remove")
        await expect(shown.locator("#ask")).to_be_hidden()
        assert household.removed == ["pi" * 8]


def _trains() -> FakePageMember:
    household = FakePageMember()
    household.job = replace(
        course(PLAN, *map(step, range(1, 30)), events.Failure("pi")),
        limit="laptop limits: laptop computes for 95% of each round of 1 s",
    )
    household.picture = PICTURE
    return household


async def test_the_last_rounds_and_what_would_help_are_shown_when_asked_for(
    browser: Browser, tmp_path: Path
) -> None:
    household = _trains()
    async with _serve(tmp_path, household) as page:
        shown = await _opened(browser, page, reduced_motion="reduce")
        await expect(shown.locator("#limit")).to_contain_text("Laptop limits")
        await shown.locator("#rounds summary").click()
        picture = shown.locator("#rounds-picture svg")
        await expect(picture).to_have_attribute("aria-label", re.compile("desk computes 25%"))
        assert await picture.locator("rect.ghost").count() == 4  # behind each of two rounds
        await shown.locator("#ask-advice").click()
        await expect(shown.locator("#advice")).to_contain_text("Without pi: 60% slower")
        assert await shown.evaluate("document.getAnimations().length") == 0


@pytest.mark.parametrize("width", [1180, 360])
@pytest.mark.parametrize("color", ["light", "dark"])
async def test_nothing_keeps_a_person_with_a_disability_out(
    browser: Browser, tmp_path: Path, color: str, width: int
) -> None:
    household = _trains()
    household.invite()
    async with _serve(tmp_path, household) as page:
        size = {"width": width, "height": 900}
        shown = await _opened(browser, page, color_scheme=color, viewport=size)
        await shown.locator("#rounds summary").click()
        await expect(shown.locator("#rounds-picture svg")).to_be_visible()
        found = await Axe().run(shown)
        serious = [
            v for v in found.response["violations"] if v["impact"] in ("serious", "critical")
        ]
        assert not serious, found.generate_report()
        assert not await shown.evaluate("document.documentElement.scrollWidth > innerWidth")


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
        updating = shown.evaluate(
            """() => new Promise((resolve) => {
                const text = document.getElementById("headline");
                const frames = [];
                let before = performance.now();
                const frame = (now) => {
                    frames.push(now - before);
                    before = now;
                    if (text.textContent.includes("10,010")) resolve(frames.sort((a, b) => a - b));
                    else requestAnimationFrame(frame);
                };
                requestAnimationFrame(frame);
            })"""
        )
        looking = asyncio.ensure_future(updating)
        for number in range(10_001, 10_011):
            last = replace(household.job.last, step=number)
            household.job = replace(household.job, last=last, points=(*household.job.points, last))
            await expect(shown.locator("#headline")).to_contain_text(f"{number:,}")
        frames = await looking
        assert frames[len(frames) // 2] < 100  # milliseconds; a person sees no stutter
