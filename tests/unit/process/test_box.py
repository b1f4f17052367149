"""What runs in a box ends there, however it ends, and reaches nothing else."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from p2ptrain.process.box import Box, BoxTask, Ended, How, NoBox, Starter, Zygote
from p2ptrain.process.confinement import has_seccomp
from tests.unit.process import misbehaving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and filters are Linux's")
needs_filter = pytest.mark.skipif(not has_seccomp(), reason="this system has no seccomp")

MODULE = misbehaving.__name__
MEMORY = 64 << 20


def question(name: str, content: bytes = b"", seconds: float = 20.0) -> BoxTask:
    return BoxTask(f"{MODULE}:{name}", content, MEMORY, seconds, 1 << 16)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote([MODULE])
    yield made
    made.close()


@pytest.fixture
def box(zygote: Zygote) -> Box:
    return Box(zygote)


async def ended(box: Box, asked: BoxTask) -> Ended:
    with pytest.raises(Ended) as raised:
        await box.ask(asked)
    return raised.value


async def test_a_question_is_answered_and_the_next_by_a_fresh_process(box: Box) -> None:
    assert await box.ask(question("turn_round", b"abc")) == b"cba"
    assert await box.ask(question("who")) != await box.ask(question("who"))


@pytest.mark.parametrize(
    ("name", "place", "by"),
    [("crash", 7, "SIGSEGV"), ("abort", 8, "SIGABRT"), ("fail", None, "exit code 78")],
)
async def test_a_crash_is_an_answer_and_says_where(
    box: Box, name: str, place: int | None, by: str
) -> None:
    found = await ended(box, question(name))
    assert (found.how, found.place, found.by) == (How.CRASH, place, by)
    assert await box.ask(question("turn_round", b"ab")) == b"ba"


async def test_memory_is_limited(box: Box) -> None:
    found = await ended(box, question("eat"))
    assert (found.how, found.place) == (How.MEMORY, 2)
    assert await box.ask(question("map_memory")) == b"OSError"


async def test_time_is_limited(box: Box, zygote: Zygote) -> None:
    found = await ended(box, question("hang", seconds=0.3))
    assert (found.how, found.place) == (How.TIME, 3)
    assert not children(zygote)


async def test_an_answer_that_is_too_long_is_none(box: Box) -> None:
    assert (await ended(box, question("answer_at_length"))).how is How.CRASH


async def test_who_no_longer_waits_ends_it(box: Box, zygote: Zygote) -> None:
    asking = asyncio.create_task(box.ask(question("hang")))
    while not children(zygote):  # noqa: ASYNC110  # another process's, of which nothing tells
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not children(zygote)
    assert await box.ask(question("turn_round", b"ab")) == b"ba"


async def test_whenever_and_however_often_one_is_cancelled_the_next_has_its_own_end(
    box: Box,
) -> None:
    """Statuses come one after the other: one that is not read would be the next question's."""
    for turns in range(8):
        asking = asyncio.create_task(box.ask(question("hang")))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await ended(box, question("fail"))).by == "exit code 78", turns


async def test_questions_of_several_wait_for_one_another(box: Box) -> None:
    answers = await asyncio.gather(*(box.ask(question("turn_round", b"ab")) for _ in range(3)))
    assert answers == [b"ba"] * 3


async def test_it_opens_neither_sockets_nor_files(box: Box, tmp_path: Path) -> None:
    known, new = tmp_path / "known", tmp_path / "new"
    known.write_text("secret")
    assert await box.ask(question("open_socket")) in (b"PermissionError", b"OSError")
    for name, path in (("write_file", new), ("read_file", known)):
        refused = await box.ask(question(name, str(path).encode()))
        assert refused in (b"PermissionError", b"OSError")
    assert not new.exists()


@needs_filter
async def test_it_starts_deletes_and_signals_nothing(box: Box, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text("secret")
    own = str(os.getpid()).encode()
    for name in ("start_program", "start_process"):
        assert await box.ask(question(name)) == b"PermissionError"
    assert await box.ask(question("signal_another", own)) == b"PermissionError"
    assert await box.ask(question("delete_file", str(known).encode())) == b"PermissionError"
    assert known.exists()


async def test_it_has_threads(box: Box) -> None:
    assert await box.ask(question("use_threads")) == misbehaving.TRIED


async def test_where_the_process_that_forks_was_ended_another_is_started(
    box: Box, zygote: Zygote
) -> None:
    await box.ask(question("who"))
    before = zygote.pid
    assert before is not None
    psutil.Process(before).kill()
    psutil.wait_procs([psutil.Process(before)], timeout=10)
    assert await box.ask(question("turn_round", b"ab")) == b"ba"
    assert zygote.pid != before


async def test_nothing_is_left_of_it_once_it_is_closed() -> None:
    made = Zygote([MODULE])
    await Box(made).ask(question("who"))
    pid = made.pid
    assert pid is not None
    made.close()
    assert not psutil.pid_exists(pid)


async def test_a_process_that_cannot_start_is_no_box() -> None:
    with pytest.raises(NoBox):
        await Box(Zygote(["p2ptrain.no_such_module"])).ask(question("who"))


async def test_without_forks_each_question_has_a_process_started_for_it() -> None:
    box = Box(Starter([MODULE]))
    assert await box.ask(question("turn_round", b"ab")) == b"ba"
    found = await ended(box, question("crash"))
    assert (found.how, found.by) == (How.CRASH, "SIGSEGV")
    assert (await ended(box, question("hang", seconds=0.2))).how is How.TIME


def children(zygote: Zygote) -> list[psutil.Process]:
    return psutil.Process(zygote.pid).children()
