"""Which job a member shows where several run, and when it forgets one."""

from __future__ import annotations

import asyncio

from p2ptrain.api.progress import PROGRESS, JobLine, ProgressBoard, ProgressReporter
from p2ptrain.net.message import Message
from tests.support.memory_household import MemoryHousehold


async def _say(mesh: MemoryHousehold, holder: str, line: JobLine) -> None:
    """Returns once c has taken it."""
    said = Message(PROGRESS, line.fields())
    await mesh[holder].call(mesh["c"].self_id, said, timeout_seconds=10.0)


def _shown(board: ProgressBoard) -> tuple[str, int] | None:
    return None if board.line is None else (board.line["holder"], board.line["step"])


async def test_a_job_that_goes_on_is_shown_after_anothers_end() -> None:
    async with MemoryHousehold(["a", "b", "c"]) as mesh:
        board = ProgressBoard(mesh["c"])
        await _say(mesh, "a", JobLine("net", step=3))
        await _say(mesh, "b", JobLine("other", step=1))
        assert _shown(board) == ("b", 1)
        await _say(mesh, "b", JobLine("other", over=True))
        assert _shown(board) == ("a", 3)
        await _say(mesh, "a", JobLine("net", over=True))
        assert _shown(board) is None


async def test_a_holder_that_is_gone_takes_its_line_alone() -> None:
    async with MemoryHousehold(["a", "b", "c"]) as mesh:
        board = ProgressBoard(mesh["c"])
        await _say(mesh, "a", JobLine("net", step=3))
        await _say(mesh, "b", JobLine("other", step=1))
        await mesh.kill("b")
        assert _shown(board) == ("a", 3)
        await mesh.kill("a")
        assert _shown(board) is None


async def test_what_all_wait_for_is_said_as_long_as_it_lasts() -> None:
    heard: asyncio.Queue[str | None] = asyncio.Queue()

    async def hear(_: str, message: Message) -> None:
        await heard.put(JobLine.read(message.fields).now)

    async with MemoryHousehold(["a", "c"]) as mesh:
        mesh["c"].route(PROGRESS, hear)
        ProgressBoard(mesh["a"])
        waits: str | None = None
        reporter = ProgressReporter(mesh["a"], "net", lambda: waits)
        for second, waits in enumerate((None, "waiting for data: reading sample 3", None)):
            await reporter.tell(10.0 * second)
            assert await heard.get() == waits
