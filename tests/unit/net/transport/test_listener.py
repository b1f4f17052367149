from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.net.transport.pace import Admission


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
