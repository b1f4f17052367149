"""What takes long in the user's code is said, again after ever longer."""

from __future__ import annotations

from p2ptrain.job.user_code import Doings


def test_it_is_said_in_time_and_rarely() -> None:
    now = 100.0
    doings = Doings(lambda: now)
    with doings.doing("reading sample {} of {}", 17, "the data"):
        said = []
        for _ in range(200):
            now += 1.0
            said += [(now - 100.0, long) for long in doings.long()]
    assert [seconds for seconds, _ in said] == [8.0, 24.0, 72.0]
    assert said[0][1] == ("reading sample 17 of the data", 8.0)
    now += 1000.0
    assert not doings.long(), "it has ended"


def test_what_ends_in_time_is_never_said() -> None:
    now = 0.0
    doings = Doings(lambda: now)
    for _ in range(30):
        with doings.doing("the metric {!r}", "f1"):
            now += 7.0
            assert not doings.long()
