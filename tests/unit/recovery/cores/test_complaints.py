"""What one device alone says stops a job a few times, and ends none."""

from __future__ import annotations

from p2ptrain.recovery.cores.retry_policy import MAX_COMPLAINTS, Complaints


def test_one_device_stops_the_same_step_a_few_times() -> None:
    complaints = Complaints("h")
    assert [complaints.is_too_often("b", 7) for _ in range(MAX_COMPLAINTS + 1)] == [
        False
    ] * MAX_COMPLAINTS + [True]
    assert not complaints.is_too_often("c", 7), "each device is counted by itself"


def test_what_stops_now_and_then_is_an_accident_for_ever() -> None:
    complaints = Complaints("h")
    assert not any(complaints.is_too_often("b", step // MAX_COMPLAINTS) for step in range(100))


def test_the_holder_is_never_left_out() -> None:
    complaints = Complaints("h")
    assert not any(complaints.is_too_often("h", 7) for _ in range(100))
    assert not any(complaints.is_link_false("h", "b", 7) for _ in range(100))


def test_a_link_that_both_ends_miss_has_ended() -> None:
    complaints = Complaints("h")
    both = [complaints.is_link_false(*ends, 7) for _ in range(9) for ends in ("bc", "cb")]
    assert not any(both)


def test_a_link_that_only_one_end_misses_has_not() -> None:
    complaints = Complaints("h")
    said = [complaints.is_link_false("b", "c", 7) for _ in range(MAX_COMPLAINTS + 1)]
    assert said == [False] * MAX_COMPLAINTS + [True]


def test_an_error_that_two_devices_have_is_the_jobs() -> None:
    complaints = Complaints("h")
    assert not complaints.ends_job("b")
    assert not complaints.ends_job("b")
    assert complaints.ends_job("c")


def test_an_error_of_the_holder_is_the_jobs() -> None:
    assert Complaints("h").ends_job("h")
