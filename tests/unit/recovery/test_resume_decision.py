"""Which job a `train` that is started again goes on with."""

from __future__ import annotations

import pytest

from p2ptrain.recovery.resume_decision import KeptJob, ResumeMode, decide_resume
from p2ptrain.recovery.version import Version

MINE = "f00d-1"
SAME = (MINE, True)
OTHER = ("cafe-1", False)
KEPT = KeptJob(MINE, Version(7, 2))


def start_of(
    found: tuple[str, bool] | None, others: set[str], kept: dict[str, KeptJob | None]
) -> ResumeMode:
    return decide_resume("f00d-", found, others, kept, fresh=False).start


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ({"b"}, {"b": KEPT}),
        ({"b", "c"}, {"b": KEPT, "c": None}),
        ({"b", "c"}, {"b": KEPT}),
        ({"b"}, {"d": KEPT}),
        ({"b"}, {}),  # it may come, and have everything
        ({"b", "c"}, {"b": None}),
    ],
)
def test_it_goes_on_while_somebody_keeps_something_or_may(
    others: set[str], kept: dict[str, KeptJob | None]
) -> None:
    assert start_of(SAME, others, kept) is ResumeMode.GO_ON


def test_it_starts_over_where_all_have_lost_everything() -> None:
    verdict = decide_resume("f00d-", SAME, {"b"}, {"b": None}, fresh=False)
    assert verdict.start is ResumeMode.FROM_START
    assert "starts from the beginning" in verdict.reason
    assert verdict.ending == {MINE}
    captured = decide_resume("f00d-", SAME, {"b"}, {"b": None}, fresh=False, captured_step=40)
    assert captured.reason.endswith("any more: it starts from step 40")


def test_a_job_of_this_device_alone_starts_over_without_a_word() -> None:
    verdict = decide_resume("f00d-", SAME, (), {"b": None}, fresh=False)
    assert (verdict.start, verdict.reason) == (ResumeMode.FROM_START, "")


@pytest.mark.parametrize("kept", [{"b": KeptJob(MINE, Version(0, 0)), "c": None}, {"b": None}, {}])
def test_a_job_that_never_had_a_plan_starts_over_without_a_word(
    kept: dict[str, KeptJob | None],
) -> None:
    """Others may have parts of first weights that this start has not drawn again."""
    verdict = decide_resume("f00d-", SAME, (), kept, fresh=False, begun=False)
    assert (verdict.start, verdict.reason, verdict.ending) == (ResumeMode.FROM_START, "", {MINE})
    older = kept | {"d": KeptJob("cafe-1", Version(3, 1))}
    verdict = decide_resume("f00d-", SAME, (), older, fresh=False, begun=False, over={"cafe-1"})
    assert (verdict.start, verdict.ending) == (ResumeMode.FROM_START, {MINE, "cafe-1"})


def test_without_its_journal_steps_would_be_reported_twice() -> None:
    verdict = decide_resume("f00d-", None, (), {"b": KEPT, "c": None}, fresh=False)
    assert verdict.start is ResumeMode.REFUSE
    assert "step 7" in verdict.reason
    assert "--fresh" in verdict.reason
    older = KeptJob("cafe-1", Version(90, 1))
    assert "step 7" in decide_resume("f00d-", None, (), {"b": KEPT, "c": older}, fresh=False).reason


def test_another_job_ends_the_unfinished_one_and_says_so() -> None:
    kept = KeptJob("cafe-1", Version(3, 1))
    verdict = decide_resume("f00d-", OTHER, {"b"}, {"b": kept}, fresh=False)
    assert verdict.start is ResumeMode.FROM_START
    assert verdict.ending == {"cafe-1"}
    assert "is dropped" in verdict.reason
    assert decide_resume("f00d-", None, (), {"b": kept}, fresh=False).ending == {"cafe-1"}


@pytest.mark.parametrize("found", [None, SAME, OTHER])
def test_fresh_ends_whatever_there_was(found: tuple[str, bool] | None) -> None:
    verdict = decide_resume("f00d-", found, {"b"}, {"b": KEPT}, fresh=True)
    assert (verdict.start, verdict.reason) == (ResumeMode.FROM_START, "")
    assert verdict.ending >= {MINE}


def test_it_goes_on_and_older_ones_end() -> None:
    kept = {"b": KEPT, "c": KeptJob("cafe-1", Version(3, 1))}
    verdict = decide_resume("f00d-", SAME, {"b"}, kept, fresh=False)
    assert verdict.start is ResumeMode.GO_ON
    assert verdict.ending == {"cafe-1"}


@pytest.mark.parametrize("found", [None, SAME, OTHER])
def test_who_did_not_hear_of_the_end_of_a_job_is_freed_without_a_word(
    found: tuple[str, bool] | None,
) -> None:
    over = {MINE} if found is None else {MINE, found[0]}
    verdict = decide_resume("f00d-", found, {"b"}, {"b": KEPT, "c": None}, fresh=False, over=over)
    assert (verdict.start, verdict.reason, verdict.ending) == (ResumeMode.FROM_START, "", over)


def test_what_has_ended_does_not_hide_what_has_not() -> None:
    kept = {"b": KeptJob("f00d-0", Version(90, 4)), "c": KEPT}
    verdict = decide_resume("f00d-", None, (), kept, fresh=False, over={"f00d-0"})
    assert verdict.start is ResumeMode.REFUSE
    assert "step 7" in verdict.reason
    verdict = decide_resume("f00d-", SAME, {"c"}, kept, fresh=False, over={"f00d-0"})
    assert (verdict.start, verdict.ending) == (ResumeMode.GO_ON, {"f00d-0"})


def test_a_new_job_in_a_clean_household_just_begins() -> None:
    verdict = decide_resume("f00d-", None, (), {"b": None}, fresh=False)
    assert (verdict.start, verdict.reason, verdict.ending) == (
        ResumeMode.FROM_START,
        "",
        frozenset(),
    )
