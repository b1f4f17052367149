"""A short sample of what `tools/soak.py` does ten thousand times, and that it finds what stays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from tools import soak


@pytest.mark.parametrize(("part", "times"), [("connects", 20), ("elections", 20)])
async def test_nothing_stays_of_what_is_done_again_and_again(part: str, times: int) -> None:
    assert await soak.soak(part, times) == []


async def test_what_stays_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytearray] = []
    opened: list[int] = []
    forever = asyncio.Event()
    tasks: set[asyncio.Task[bool]] = set()

    async def leaking() -> AsyncIterator[None]:
        while True:
            kept.append(bytearray(os.urandom(1) * (64 << 20)))
            opened.append(os.open(os.devnull, os.O_RDONLY))
            tasks.add(asyncio.create_task(forever.wait()))
            yield

    monkeypatch.setitem(soak.PARTS, "leaking", leaking)
    monkeypatch.setattr(soak, "SETTLING_SECONDS", 0.0)
    try:
        said = await soak.soak("leaking", 4)
    finally:
        forever.set()
        for number in opened:
            os.close(number)
    assert [what.split()[0] for what in said] == ["memory", "descriptors", "tasks", "3"]
