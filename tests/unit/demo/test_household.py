"""A device process is read as events, and ended whatever it does."""

from __future__ import annotations

import signal
import sys
from typing import Any

from p2ptrain.demo.household import DeviceProcess

TALKS = """
import json, sys
print(json.dumps({"event": "arguments", "all": sys.argv[1:]}), flush=True)
print("a word", file=sys.stderr)
sys.exit(3)
"""
STAYS = """
import json, signal
print(json.dumps({"event": "ready"}), flush=True)
signal.pause()
"""
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS


async def _start(code: str, *arguments: str) -> DeviceProcess:
    """`code` runs instead of p2ptrain: what follows is its argv."""
    return await DeviceProcess.start("x", arguments, prefix=[sys.executable, "-c", code])


async def _events(device: DeviceProcess) -> list[dict[str, Any]]:
    return [event async for event in device.events()]


async def test_events_exit_code_and_last_words_are_kept() -> None:
    device = await _start(TALKS, "join", "--name", "x")
    (event,) = await _events(device)
    assert event["all"][-4:] == ["join", "--name", "x", "--json"]
    assert event["all"][:3] == [sys.executable, "-m", "p2ptrain"]
    assert await device.wait() == 3
    assert list(device.stderr) == ["a word"]
    assert await device.stop() == 3


async def test_a_device_that_leaves_is_not_killed() -> None:
    device = await _start(STAYS)
    await anext(device.events())
    assert device.exit_code is None
    assert await device.stop() == -signal.SIGTERM


async def test_a_device_that_does_not_leave_is_killed(monkeypatch: Any) -> None:
    monkeypatch.setattr("p2ptrain.demo.household.STOP_SECONDS", 0.01)
    device = await _start(IGNORES_SIGTERM)
    await anext(device.events())
    assert await device.stop() == -signal.SIGKILL
