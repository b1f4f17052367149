from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.holder.job_record import JobRecord
from p2ptrain.holder.start.journal import Journal, JournalEntry
from p2ptrain.recovery.cores.job_history import ReportedProgress
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.snapshot_schedule import SnapshotCost, SnapshotSchedule
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version

ENTRY = JournalEntry.new("f00d-1", "f00d", "abc", 0, ReportedProgress(0, 0))


def _memory(*, has_first_weights: bool) -> JobRecord:
    journal = Journal(None, ENTRY, pytest.fail)
    held = (Version(0, 0),) if has_first_weights else ()
    return JobRecord(ENTRY, journal, held=lambda: held, writes=False, since=0.0)


@pytest.mark.parametrize("round_seconds", [0.6, 7.0, 50.0])
def test_the_first_weights_count_until_the_first_copies_should_be_there(
    round_seconds: float,
) -> None:
    """However dear copies are: ordered after the cadence's limit, and as long on their way."""
    (first,) = _memory(has_first_weights=True).copies("a", round_seconds)
    assert first.kind is StateKind.INITIAL
    assert first.most_replayed is not None
    cadence = SnapshotSchedule(SnapshotCost(1e6, (), round_seconds), 0, 0.0)
    on_its_way = HOME.replay_limit_seconds / round_seconds
    assert first.most_replayed >= cadence.interval_rounds + on_its_way


def test_first_weights_that_are_not_here_any_more_do_not_count() -> None:
    assert _memory(has_first_weights=False).copies("a", 0.6) == ()


def test_generation_numbers_that_were_reserved_are_used_up_before_there_is_a_plan() -> None:
    assert _memory(has_first_weights=True).noted is None
    entry = replace(ENTRY, next_generation=65)
    journal = Journal(None, entry, pytest.fail)
    noted = JobRecord(entry, journal, held=lambda: (), writes=False, since=0.0).noted
    assert noted is not None
    assert noted.next_generation == 65
