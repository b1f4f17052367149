"""The stream: whole states first, bounded for who does not read; and who is let in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p2ptrain.page.sessions import COOKIE_SECONDS, TOKEN_SECONDS, GuessLimit, Reach, Sessions
from p2ptrain.page.stream import StateStream, TooManyBrowsers, Watcher


async def _frames(watcher: Watcher) -> list[tuple[str, str, Any]]:
    """All that it still gets, once it is closed to more."""
    found = []
    async for frame in watcher.frames(0.0):
        if frame.startswith(b"event: alive"):
            break
        kind, number, data = frame.decode().strip().split("\n")
        found.append((kind[7:], number[4:], json.loads(data[6:])))
    return found


async def test_each_browser_gets_all_and_then_what_changes() -> None:
    stream = StateStream("e")
    early = stream.join()
    stream.publish({"notes": [1], "job": {"step": 1}})
    stream.publish({"notes": [1], "job": {"step": 2}})
    stream.publish({"notes": [1], "job": {"step": 2}})
    late = stream.join()
    stream.publish({"notes": [1, 2], "job": {"step": 2}})
    assert await _frames(early) == [
        ("state", "e-1", {"notes": [1], "job": {"step": 1}}),
        ("change", "e-2", {"job": {"step": 2}}),
        ("change", "e-3", {"notes": [1, 2]}),
    ]
    assert await _frames(late) == [
        ("state", "e-2", {"notes": [1], "job": {"step": 2}}),
        ("change", "e-3", {"notes": [1, 2]}),
    ]


async def test_a_browser_that_does_not_read_is_let_go_of_and_others_are_not() -> None:
    stream = StateStream("e")
    stalled, reading = stream.join(limit=3), stream.join(limit=100)
    for number in range(10):
        stream.publish({"job": {"step": number}})
    assert stalled.is_gone
    assert [frame async for frame in stalled.frames(60.0)] == []
    assert len(await _frames(reading)) == 10


async def test_who_comes_after_all_have_gone_gets_nothing_old() -> None:
    stream = StateStream("e", browsers=1)
    first = stream.join()
    stream.publish({"job": {"step": 1}})
    with pytest.raises(TooManyBrowsers):
        stream.join()
    stream.part(first)
    second = stream.join()
    stream.publish({"job": {"step": 9}})
    assert await _frames(second) == [("state", "e-2", {"job": {"step": 9}})]


async def test_a_quiet_stream_gives_signs_of_life() -> None:
    watcher = Watcher()
    async for frame in watcher.frames(0.001):
        assert frame == b"event: alive\ndata: \n\n"
        break


def test_a_token_counts_once_in_time_and_where_it_was_meant() -> None:
    sessions = Sessions(b"k" * 32)
    token = sessions.new_token(Reach.HERE, 0.0)
    assert sessions.redeem("x" + token, Reach.HERE, 1.0, 1000) is None
    assert sessions.redeem(token, Reach.LAN, 1.0, 1000) is None
    cookie = sessions.redeem(token, Reach.HERE, 1.0, 1000)
    assert cookie is not None
    assert sessions.redeem(token, Reach.HERE, 1.0, 1000) is None
    late = sessions.new_token(Reach.HERE, 0.0)
    assert sessions.redeem(late, Reach.HERE, TOKEN_SECONDS, 1000) is None


def test_a_cookie_counts_for_a_month_with_its_key_where_it_was_given() -> None:
    sessions = Sessions(b"k" * 32)
    cookie = sessions.redeem(sessions.new_token(Reach.LAN, 0.0), Reach.LAN, 1.0, 1000)
    assert cookie is not None
    again = Sessions(b"k" * 32)  # as after a restart
    assert again.is_known(cookie, Reach.LAN, 1000 + COOKIE_SECONDS - 1)
    assert not again.is_known(cookie, Reach.LAN, 1000 + COOKIE_SECONDS)
    assert not again.is_known(cookie, Reach.HERE, 1001)
    assert not Sessions(b"l" * 32).is_known(cookie, Reach.LAN, 1001)
    for wrong in (
        None,
        "",
        "...",
        cookie[:-1],
        cookie.replace("lan", "here"),
        "é" * 90,
        cookie * 9,
    ):
        assert not again.is_known(wrong, Reach.LAN, 1001)


def test_guesses_are_limited_by_address_and_time() -> None:
    limit = GuessLimit(most=3, within_seconds=60.0, addresses=2)
    for second in range(3):
        assert not limit.is_over("a", second)
        limit.wrong("a", second)
    assert limit.is_over("a", 3.0)
    assert not limit.is_over("b", 3.0)
    assert not limit.is_over("a", 61.0)
