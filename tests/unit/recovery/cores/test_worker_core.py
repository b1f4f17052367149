"""Whom a device obeys, and what it keeps."""

from __future__ import annotations

import dataclasses

import pytest

from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.cores.worker_port import HolderState, StateReportAsked, WorkerPhase
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StageCopy, StateEntry, StateKind
from p2ptrain.recovery.version import Lineage, Version
from tests.unit.recovery.cores.recorded_port import Asked, RecordedPort

_FIRST = Version(0, 0)


def _placed(generation: int, version: Version = _FIRST, *devices: str) -> Placement:
    stages = (PlacedStage(0, 2, ("h",), "b"), PlacedStage(2, 4, (*devices, "b"), "h"))
    return Placement(generation, "h", version, Lineage(), stages, keeps=True)


class _Device(WorkerCore):
    """With what it has had done."""

    def __init__(self, device: str = "b") -> None:
        self.port = RecordedPort("phase_changed")
        super().__init__(device, self.port)

    def taken(self) -> list[Asked]:
        return self.port.taken()

    def trains(self, live: tuple[StateEntry, ...]) -> None:
        """That is so from now on."""
        others = [entry for entry in self.port.here if entry.kind is not StateKind.LIVE]
        self.port.here = [*live, *others]

    def has(self, first: int, end: int, version: Version, kind: StateKind) -> None:
        """A copy is there now."""
        self.port.here.append(StateEntry(first, end, version, kind))

    def copied(self, first: int, end: int, version: Version) -> None:
        self.has(first, end, version, StateKind.KEPT)
        super().copied(first, end, version)

    def asked(
        self, generation: int, *, peer: str = "h", apply: Version | None = None
    ) -> list[Asked]:
        self.state_asked(StateReportAsked(generation, peer, generation, apply))
        return self.taken()

    def stands_ready(self, placed: Placement, *fetches: Fetch) -> None:
        self.prepare_asked(1, "h", placed, fetches)
        self.built(placed.generation)
        self.taken()


def _running(generation: int = 3, placed: Placement | None = None, device: str = "b") -> _Device:
    core = _Device(device)
    core.asked(generation)
    core.stands_ready(placed or _placed(generation), Fetch(2, 4, "h"))
    core.begin("h", generation)
    core.trains((_live(0),))
    core.taken()
    assert core.phase is WorkerPhase.RUNNING
    return core


def _live(step: int, *, ready: bool = False, generation: int = 3) -> StateEntry:
    version = Version(step, generation) if step else _FIRST
    return StateEntry(
        2, 4, version, StateKind.LIVE, Version(step + 1, generation) if ready else None
    )


def _stopped(*held: StateEntry, generation: int = 4) -> _Device:
    core = _running()
    core.asked(generation)
    core.trains(held)
    core.stopped()
    core.taken()
    return core


def test_from_nothing_to_training() -> None:
    core = _Device()
    assert core.asked(3) == [("answer_state", 3, "h", ())]
    core.prepare_asked(9, "h", _placed(3), (Fetch(2, 4, "h"),))
    assert core.taken() == [("make_ready", 3, _FIRST, (Fetch(2, 4, "h"),))]
    core.has(2, 4, _FIRST, StateKind.FETCHED)
    core.built(3)
    assert core.taken() == [("answer_ready", 9, "h", None)]
    core.begin("h", 3)
    assert core.taken() == [
        ("start_stages", _placed(3)),
        ("drop_state", (StateEntry(2, 4, _FIRST, StateKind.FETCHED),)),
        ("copy_stages", _FIRST),
    ]


def test_a_part_that_was_given_up_is_said_when_its_generation_begins() -> None:
    """The holder was away for a moment only here, and has accepted what this device dropped."""
    core = _stopped(_live(2))
    core.stands_ready(_placed(4, Version(2, 3)))
    core.holder_is(HolderState.GONE)
    core.taken()
    core.begin("h", 4)  # so that it asks at once
    assert core.taken() == [("report_link", "h", 4, "h", back) for back in (False, True)]
    assert core.entries[0] == _live(2)


def test_fifty_commands_of_another_device_are_refused_however_new() -> None:
    core = _running()
    for n in range(1, 51):
        [(what, *_)] = core.asked(4**n, peer="n")
        assert what == "refuse"
    assert core.phase is WorkerPhase.RUNNING
    assert core.refused == 50


def test_nobody_stops_the_generation_that_runs_but_for_a_newer_one() -> None:
    core = _running(3)
    [(what, *_)] = core.asked(3)
    assert what == "refuse"
    assert core.asked(4) == [("stop_stages",)]


def test_a_commit_is_applied_once_and_only_when_ready() -> None:
    core = _running()
    core.commit("h", 3, 0)
    assert core.taken() == []
    assert core.round_ordered("h", 3, 0, keep=True)
    core.trains((_live(0, ready=True),))
    core.commit("h", 3, 0)
    core.commit("h", 3, 0)
    assert core.taken() == [("apply_update", 3, Version(1, 3), None, True)]
    assert core.refused == 2
    core.trains((_live(1),))
    assert core.entries == (_live(1),)


def test_commands_of_another_holder_or_generation_change_nothing() -> None:
    core = _running()
    core.trains((_live(0, ready=True),))
    core.commit("x", 3, 0)
    core.commit("h", 2, 0)
    assert not core.round_ordered("h", 2, 0)
    core.begin("x", 9)
    assert core.taken() == []
    assert core.refused == 4


def test_an_order_that_overtakes_the_beginning_begins() -> None:
    core = _Device()
    core.asked(3)
    core.stands_ready(_placed(3), Fetch(2, 4, "h"))
    assert core.round_ordered("h", 3, 0)
    assert core.taken()[0] == ("start_stages", _placed(3))


def test_a_commit_after_the_stop_is_not_applied() -> None:
    core = _running()
    core.trains((_live(0, ready=True),))
    core.asked(4)
    core.commit("h", 3, 0)
    assert core.taken() == []
    core.trains((_live(0, ready=True),))
    core.stopped()
    assert core.taken() == [("answer_state", 4, "h", (_live(0, ready=True),))]


def test_who_learns_that_it_counts_applies_before_it_answers() -> None:
    core, ready = _stopped(_live(0, ready=True)), Version(1, 3)
    assert core.asked(4, apply=ready) == [("apply_update", 3, ready, None, False)]
    # asked again before it is done: not applied twice
    assert core.asked(4, apply=ready) == [("refuse", 4, "h", "asked again since")]
    core.trains((_live(1),))
    core.caught_up(3, 2)
    assert core.taken() == [("answer_state", 4, "h", (_live(1),))]


def test_what_is_torn_is_never_offered() -> None:
    core = _stopped(_live(0, ready=True))
    core.asked(4, apply=Version(1, 3))
    core.trains(())
    core.caught_up(3, 2)
    assert core.taken() == [("answer_state", 4, "h", ())]


def test_a_generation_without_this_device_frees_what_it_trained_but_not_its_copies() -> None:
    core = _running()
    core.copied(2, 4, _FIRST)
    core.asked(4)
    core.trains((_live(1),))
    core.stopped()
    core.taken()
    core.begin("h", 4)
    assert core.taken() == [("drop_state", (_live(1),))]
    core.trains(())
    assert core.entries == (StateEntry(2, 4, _FIRST, StateKind.KEPT),)
    assert core.phase is WorkerPhase.IDLE


def test_a_beginning_from_before_the_newest_question_is_ignored() -> None:
    core = _stopped(_live(1), generation=9)
    core.begin("h", 8)
    assert core.taken() == []
    assert core.entries == (_live(1),)


def test_a_question_ends_a_preparation_and_keeps_what_arrived() -> None:
    core = _Device()
    part = StateEntry(2, 3, _FIRST, StateKind.FETCHED)
    core.asked(3)
    core.prepare_asked(7, "h", _placed(3), (Fetch(2, 4, "h"),))
    core.has(2, 3, _FIRST, StateKind.FETCHED)
    core.taken()
    assert core.asked(4) == [
        ("refuse", 7, "h", "asked again since"),
        ("cancel_prepare",),
        ("answer_state", 4, "h", (part,)),
    ]
    core.built(3)
    assert core.taken() == []
    assert core.entries == (part,)


def test_only_older_copies_go_when_the_holder_names_what_stays() -> None:
    core = _running()
    for step in (4, 8, 12):
        core.copied(2, 4, Version(step, 3))
    core.taken()
    core.retain("h", (Version(8, 3),))
    assert core.taken() == [("drop_state", (StateEntry(2, 4, Version(4, 3), StateKind.KEPT),))]


def test_a_device_parks_with_everything_while_the_holder_is_gone() -> None:
    core, held = _running(), _live(1, ready=True)
    core.holder_is(HolderState.GONE)
    # where it was news of an earlier process, the next one hears that this device has stopped
    said = [("report_link", "h", 3, "h", back) for back in (False, True)]
    assert core.taken() == [("stop_stages",), *said]
    core.trains((held,))
    core.stopped()
    assert core.taken() == [("report_orphaned", "h")]
    assert core.phase is WorkerPhase.ORPHANED
    assert core.entries == (held,)
    assert core.asked(4) == [("answer_state", 4, "h", (held,))]


def _orphaned() -> _Device:
    core = _running()
    core.holder_is(HolderState.GONE)
    core.trains((_live(1, ready=True),))
    core.stopped()
    core.taken()
    assert core.phase is WorkerPhase.ORPHANED
    return core


@pytest.mark.parametrize("state", [HolderState.LEFT, HolderState.GONE])
def test_another_process_of_the_holders_device_ends_nothing(state: HolderState) -> None:
    """A `join` took its place meanwhile, and steps aside for the next `train`, or dies too."""
    core = _orphaned()
    held = core.entries
    core.holder_is(state)
    assert core.taken() == []
    assert core.entries == held
    stopping = _running()
    stopping.holder_is(HolderState.GONE)
    stopping.taken()
    stopping.holder_is(state)
    assert stopping.taken() == []
    stopping.trains((_live(1),))
    stopping.stopped()
    assert stopping.taken() == [("report_orphaned", "h")]


def test_each_time_the_holder_is_gone_is_reported_once() -> None:
    core = _orphaned()
    core.holder_is(HolderState.GONE)
    assert core.taken() == []
    core.asked(4)
    assert core.phase is WorkerPhase.STOPPED
    core.holder_is(HolderState.GONE)
    assert core.taken() == [("report_orphaned", "h")]


def test_a_device_that_keeps_nothing_waits_for_nobody() -> None:
    core = _Device("d")
    core.asked(3)
    core.holder_is(HolderState.GONE)
    assert core.taken() == []
    assert core.phase is WorkerPhase.IDLE


def test_a_generation_that_began_without_it_ends_a_device_s_wait() -> None:
    core = _orphaned()
    core.begin("h", 9)
    assert core.taken() == [("drop_state", (_live(1, ready=True),))]
    assert core.phase is WorkerPhase.IDLE


@pytest.mark.parametrize("state", [HolderState.LEFT, HolderState.ENDED])
def test_the_end_of_the_job_frees_all(state: HolderState) -> None:
    core = _running()
    core.holder_is(state)
    assert core.taken() == [("release_job",)]
    assert core.entries == ()
    assert core.generation == 3
    orphaned = _orphaned()
    orphaned.holder_is(HolderState.ENDED)
    assert orphaned.taken() == [("release_job",)]


def test_each_new_phase_is_said() -> None:
    """Whether this device is free for another job follows from it."""
    port = RecordedPort()
    core = WorkerCore("b", port)
    core.state_asked(StateReportAsked(3, "h", 3))
    assert ("phase_changed",) in port.taken()
    core.holder_is(HolderState.ENDED)
    assert port.taken() == [("phase_changed",), ("release_job",)]


def test_a_link_that_is_back_is_reported_once() -> None:
    stages = (PlacedStage(0, 2, ("c",)), PlacedStage(2, 4, ("b",)))
    core = _running(3, Placement(3, "h", _FIRST, Lineage(), stages))
    core.link_started("c")
    assert core.taken() == []
    core.link_ended("c")
    assert core.taken() == [("report_link", "h", 3, "c", False)]
    core.link_started("c")
    assert core.taken() == [("report_link", "h", 3, "c", True)]
    core.link_started("c")
    assert core.taken() == []


def test_a_broken_link_is_reported_where_it_matters() -> None:
    core = _running()
    core.link_ended("x")
    core.link_ended("h")
    assert core.taken() == []
    holder = _running(device="h")
    holder.link_ended("b")  # the holder sees its own links
    assert holder.taken() == []


def _copy(version: Version, first: int = 2, end: int = 4, *, generation: int = 3) -> StageCopy:
    return StageCopy(generation, first, end, version)


def test_a_copy_goes_to_its_keeper_or_to_whom_the_holder_names_instead() -> None:
    core, new, later = _running(), Version(4, 3), Version(6, 3)
    core.copied(2, 4, new)
    assert core.taken() == [("offer_copy", "h", _copy(new))]
    refused = core.refused
    core.keeper_assigned("k", _copy(new), "x")  # only the holder says so
    assert core.taken() == []
    assert core.refused == refused + 1
    core.keeper_assigned("h", _copy(new), "x")
    assert core.taken() == [("offer_copy", "x", _copy(new))]
    core.keeper_assigned("h", _copy(later), "y")  # no copy of that one yet
    assert core.taken() == []
    core.copied(2, 4, later)
    assert core.taken() == [("offer_copy", "y", _copy(later))]


def test_what_the_holder_alone_reads_is_offered_to_nobody() -> None:
    """A checkpoint's version, while an older one is on its way to the backup peers."""
    core, read, later = _running(), Version(4, 3), Version(5, 3)
    core.round_ordered("h", 3, 3, keep=True, stay=(read,), offer=False)
    core.copied(2, 4, read)
    assert core.taken() == []
    assert StateEntry(2, 4, read, StateKind.KEPT) in core.entries
    core.round_ordered("h", 3, 4, keep=True, stay=(read, later))
    core.copied(2, 4, later)
    assert core.taken() == [("offer_copy", "h", _copy(later))]


def test_who_copies_for_itself_alone_says_so() -> None:
    """In a group, or where nobody has room: without it a version would not be whole."""
    stages = (PlacedStage(0, 2, ("h",), "b"), PlacedStage(2, 4, ("b", "c")))
    core = _running(3, dataclasses.replace(_placed(3), stages=stages))
    core.copied(2, 4, Version(4, 3))
    assert core.taken() == [("report_copy", "h", _copy(Version(4, 3)), None)]


def test_a_copy_that_failed_is_reported_while_its_generation_runs() -> None:
    core, copy = _running(), _copy(Version(4, 3), 0, 2)
    core.copy_failed(copy, "no memory")
    assert core.taken() == [("report_copy", "h", copy, "no memory")]
    core.copy_failed(dataclasses.replace(copy, generation=2), "no memory")
    assert core.taken() == []


def test_only_who_trains_or_is_about_to_reads_copies_for_others() -> None:
    core, copy = _running(), _copy(Version(4, 3), 0, 2)
    assert core.offered("h", copy)
    assert not core.offered("h", _copy(Version(4, 3))), "not its stage"
    core.asked(4)
    assert not core.offered("h", copy)
    core.trains((_live(0),))
    core.stopped()
    assert not core.offered("h", copy)
    core.prepare_asked(2, "h", _placed(5), ())
    core.taken()
    early = dataclasses.replace(copy, generation=5)
    assert core.offered("h", early)
    core.collected(early)
    assert core.taken() == [("report_copy", "h", early, None)]
    core.built(5)
    core.begin("h", 5)
    core.begin("h", 6)
    assert not core.offered("h", early), "a generation without it has begun"


def test_a_copy_that_is_ready_after_the_end_of_the_job_is_not_kept() -> None:
    """Else the holder's next process would hear that its job continues here."""
    core = _running()
    core.holder_is(HolderState.ENDED)
    core.taken()
    core.copied(2, 4, Version(4, 3))
    core.collected(_copy(Version(4, 3), 0, 2))
    assert core.taken() == []


_LOST = Rebuild("b", 0, 0, 2, 3, Version(2, 3), Version(5, 3))


def _rebuilding() -> _Device:
    core = _running()
    core.state_asked(StateReportAsked(4, "h", 4, rebuild=_LOST))
    core.trains((_live(5),))
    core.stopped()
    assert core.taken() == [("stop_stages",), ("rebuild_stage", 4, _LOST)]
    return core


def test_a_lost_stage_is_made_before_the_answer() -> None:
    core = _rebuilding()
    made = StateEntry(0, 2, Version(5, 3), StateKind.FETCHED)
    core.port.here.append(made)
    core.rebuilt(4)
    assert core.taken() == [("answer_state", 4, "h", (_live(5), made))]
    core.prepare_asked(9, "h", _placed(4, Version(5, 3)), ())
    # it stays for the generation that begins with it
    assert core.taken() == [("make_ready", 4, Version(5, 3), ())]


def test_who_could_not_make_it_answers_with_what_there_is() -> None:
    core = _rebuilding()
    core.rebuilt(4)
    assert core.taken() == [("answer_state", 4, "h", (_live(5),))]


def test_the_next_question_ends_the_making() -> None:
    core = _rebuilding()
    assert core.asked(5) == [
        ("refuse", 4, "h", "asked again since"),
        ("cancel_rebuild",),
        ("answer_state", 5, "h", (_live(5),)),
    ]
    core.rebuilt(4)  # nobody waits for it
    assert core.taken() == []


def test_the_end_of_the_job_ends_the_making() -> None:
    core = _rebuilding()
    core.holder_is(HolderState.ENDED)
    assert core.taken() == [("release_job",)]
    core.rebuilt(4)
    assert core.taken() == []
