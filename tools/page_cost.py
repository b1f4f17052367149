"""What open pages cost a training: `python -m tools.page_cost`.

Three devices on this machine train the char_gpt example; ten connections follow the page of the
device with the data, which does most for them, and read all that it sends. Stretches with pages
and without alternate, so that what else the machine does falls on both. With `--rounds` each page
also asks for the last rounds every 3 s, as one whose timeline is open does.

Printed are, without pages and with them, the least and the median seconds of a step, their ratios
(the median one is that of the pairs of stretches), the processor seconds a second that the device's
process takes, and how many more with pages, which hangs least on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean, median

import aiohttp
import psutil
from yarl import URL

from p2ptrain.mesh.trust.pairing_window import new_code
from tests.system.household import Device, Household

HOLDER, MEMBERS = "study-desktop", ("kitchen-laptop", "old-notebook")

SCRIPT = ("examples/char_gpt.py", "-o", "epochs=100", "--planner", "pp")

WARM_UP_STEPS = 20

STRETCH_SECONDS = 600.0
"""At most: the machine may do other things."""

ROUNDS_SECONDS = 3.0
"""As page.js asks."""


async def _let_in(household: Household) -> tuple[aiohttp.ClientSession, URL]:
    session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
    asked = await household.ask(HOLDER, "page", "--no-browser")
    url = URL(asked.events[0]["url"])
    async with session.get(url) as answer:
        answer.raise_for_status()
    return session, url.origin()


async def _follow(session: aiohttp.ClientSession, origin: URL) -> None:
    async with session.get(origin / "events", timeout=aiohttp.ClientTimeout()) as answer:
        answer.raise_for_status()
        async for _ in answer.content.iter_any():
            pass


async def _ask_for_rounds(session: aiohttp.ClientSession, origin: URL) -> None:
    while True:
        async with session.get(origin / "rounds") as answer:
            await answer.read()
        await asyncio.sleep(ROUNDS_SECONDS)


@contextlib.asynccontextmanager
async def _pages(
    session: aiohttp.ClientSession, origin: URL, count: int, *, rounds: bool
) -> AsyncIterator[None]:
    looks = [_follow, _ask_for_rounds] if rounds else [_follow]
    tasks = [asyncio.create_task(look(session, origin)) for look in looks for _ in range(count)]
    try:
        yield
        failed = [task.exception() for task in tasks if task.done()]
        if failed:
            raise RuntimeError(f"pages have ended: {failed[0]}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stretch(holder: Device, steps: int) -> tuple[list[float], float]:
    """Seconds of each of so many steps, and of the processor a second."""
    process = psutil.Process(holder.pid)
    begin = len(holder.events("step")) + 2  # what was under way
    await holder.expect("step", step=begin)
    times = process.cpu_times()
    await holder.expect("step", STRETCH_SECONDS, step=begin + steps)
    after = process.cpu_times()
    seconds = [event["seconds"] for event in holder.events("step")[begin : begin + steps]]
    used = after.user + after.system - times.user - times.system
    return seconds, used / sum(seconds)


async def _measure(args: argparse.Namespace) -> None:
    found: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    ratios, more = [], []
    own = ("--code", new_code(), "--interface", "127.0.0.1", "--device", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        async with Household(Path(folder)) as household:
            for name in MEMBERS:
                await household.start(name, "join", *own)
            wait = ("--wait-for", str(1 + len(MEMBERS)))
            holder = await household.start(HOLDER, "train", *SCRIPT, *wait, *own)
            await holder.expect("step", STRETCH_SECONDS, step=WARM_UP_STEPS)
            session, origin = await _let_in(household)
            async with session:
                for number in range(args.pairs):
                    medians, means = {}, {}
                    for looks in (number % 2 == 0, number % 2 == 1):  # neither is always first
                        count = args.pages if looks else 0
                        async with _pages(session, origin, count, rounds=args.rounds):
                            seconds, used = await _stretch(holder, args.steps)
                        found[looks] += seconds
                        medians[looks], means[looks] = median(seconds), fmean(seconds)
                        cpu[looks].append(used)
                    ratios.append(medians[True] / medians[False])
                    per_step = [cpu[x][-1] * means[x] for x in (False, True)]
                    more.append((per_step[1] - per_step[0]) / means[True])
    with_pages, without = found[True], found[False]
    print(
        json.dumps(
            {
                "pages": args.pages,
                "steps": len(with_pages),
                "least_ms": [round(1000 * min(x), 2) for x in (without, with_pages)],
                "median_ms": [round(1000 * median(x), 2) for x in (without, with_pages)],
                "least_ratio": round(min(with_pages) / min(without), 4),
                "median_ratio": round(median(ratios), 4),
                "holder_cpu": [round(median(cpu[x]), 4) for x in (False, True)],
                "more_cpu": round(median(more), 4),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", type=int, default=10, help="open at the same time")
    parser.add_argument("--pairs", type=int, default=10, help="stretches with and without")
    parser.add_argument("--steps", type=int, default=20, help="of a stretch")
    parser.add_argument("--rounds", action="store_true", help="the last rounds are open too")
    asyncio.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
