from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.net.transport.pace import KEYS_LIMIT, Admission, Pace, Rate

EACH, ALL = Rate(per_second=2.0, burst=3.0), Rate(per_second=5.0, burst=6.0)


def test_a_burst_and_then_the_rate() -> None:
    pace: Pace[str] = Pace(EACH, Rate(100.0, 100.0))
    assert [pace.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert pace.wait_seconds("a", 0.0) == 0.5
    assert [pace.take("a", 0.5) for _ in range(2)] == [True, False]
    assert pace.take("b", 0.5)


def test_all_together_have_a_rate_too_and_the_exempt_need_none_of_it() -> None:
    pace: Pace[int] = Pace(EACH, ALL)
    assert sum(pace.take(key, 0.0) for key in range(20)) == 6
    assert pace.take(99, 0.0, exempt=True)
    assert [pace.take(99, 0.0, exempt=True) for _ in range(3)] == [True, True, False]


def test_what_is_given_back_counts_again() -> None:
    pace: Pace[str] = Pace(Rate(1e-6, 1.0), Rate(1e-6, 1.0))
    for _ in range(3):
        assert pace.take("a", 0.0)
        assert not pace.take("b", 0.0)
        pace.give_back("a")


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 2.0)), max_size=60))
def test_no_key_ever_has_more_than_the_rates_allow(steps: list[tuple[int, float]]) -> None:
    pace: Pace[int] = Pace(EACH, ALL)
    now, taken = 0.0, dict.fromkeys(range(5), 0)
    for key, pause in steps:
        now += pause
        taken[key] += pace.take(key, now)
    assert all(count <= EACH.burst + EACH.per_second * now + 1e-6 for count in taken.values())
    assert sum(taken.values()) <= ALL.burst + ALL.per_second * now + 1e-6


def test_keys_are_forgotten() -> None:
    pace: Pace[int] = Pace(EACH, Rate(1e9, 1e9))
    while pace.take(0, 0.0):
        pass
    for key in range(1, KEYS_LIMIT):
        assert pace.take(key, 0.0)
    assert not pace.take(0, 0.0), "it is known as long as there is room"
    for key in range(1, KEYS_LIMIT + 1):
        assert pace.take(key, 0.0)
    assert pace.take(0, 0.0)


def test_the_newest_pushes_out_the_oldest_of_its_address() -> None:
    admission: Admission[int] = Admission(per_address_limit=2, total_limit=10)
    assert [admission.admit(key, "a") for key in range(4)] == [None, None, 0, 1]
    assert admission.admit(9, "b") is None
    assert len(admission) == 3


def test_a_full_house_cuts_the_most_crowded_address() -> None:
    admission: Admission[int] = Admission(per_address_limit=3, total_limit=4)
    for key, address in enumerate(["b", "a", "a", "a"]):
        admission.admit(key, address)
    assert admission.admit(4, "c") == 1


def test_an_authenticated_device_makes_room() -> None:
    admission: Admission[int] = Admission(per_address_limit=1, total_limit=10)
    admission.admit(1, "a")
    admission.release(1)
    admission.release(1)
    assert admission.admit(2, "a") is None


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.sampled_from("abcdef")), max_size=200)
)
def test_limits_hold_whatever_happens(steps: list[tuple[bool, int, str]]) -> None:
    admission: Admission[tuple[int, int]] = Admission(per_address_limit=3, total_limit=7)
    here: dict[tuple[int, int], str] = {}
    for serial, (comes, number, address) in enumerate(steps):
        if comes:
            evicted = admission.admit((serial, number), address)
            if evicted is not None:
                del here[evicted]
            here[serial, number] = address
        elif here:
            key = sorted(here)[number % len(here)]
            admission.release(key)
            del here[key]
        assert len(admission) == len(here) <= 7
        assert all(list(here.values()).count(where) <= 3 for where in "abcdef")
