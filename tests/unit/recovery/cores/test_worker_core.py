"""Whom a device obeys, and what it keeps."""

from __future__ import annotations

import dataclasses

import pytest

from p2ptrain.recovery.cores import worker_events, worker_instructions
from p2ptrain.recovery.cores.worker_core import WorkerCore, WorkerPhase
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Lineage, Version

_FIRST = Version(0, 0)


def _placed(generation: int, version: Version = _FIRST, *devices: str) -> Placement:
    stages = (PlacedStage(0, 2, ("h",), "b"), PlacedStage(2, 4, (*devices, "b"), "h"))
    return Placement(generation, "h", version, Lineage(), stages, keeps=True)


def _ask(generation: int, *, peer: str = "h", apply: Version | None = None) -> object:
    return worker_events.StateReportAsked(generation, peer, generation, apply)


def _feed(core: WorkerCore, *events: object) -> list[worker_instructions.DeviceInstruction]:
    out: list[worker_instructions.DeviceInstruction] = []
    for event in events:
        out += core.handle(event)  # type: ignore[arg-type]
    return out


def _running(generation: int = 3) -> WorkerCore:
    core = WorkerCore("b")
    fetch = (Fetch(2, 4, "h"),)
    _feed(
        core,
        _ask(generation),
        worker_events.PrepareAsked(1, "h", _placed(generation), fetch),
        worker_events.PartFetched(generation, 2, 4, _FIRST),
        worker_events.Fetched(generation),
        worker_events.Built(generation),
        worker_events.BeginReceived("h", generation),
    )
    assert core.phase is WorkerPhase.RUNNING
    return core


def _live(step: int, *, ready: bool = False, generation: int = 3) -> StateEntry:
    version = Version(step, generation) if step else _FIRST
    return StateEntry(
        2, 4, version, StateKind.LIVE, Version(step + 1, generation) if ready else None
    )


def test_from_nothing_to_training() -> None:
    core = WorkerCore("b")
    [answer] = _feed(core, _ask(3))
    assert answer == worker_instructions.AnswerStateReport(3, "h", 3, ())
    [fetch] = _feed(core, worker_events.PrepareAsked(9, "h", _placed(3), (Fetch(2, 4, "h"),)))
    assert fetch == worker_instructions.FetchParts(3, _FIRST, (Fetch(2, 4, "h"),))
    assert _feed(core, worker_events.PartFetched(3, 2, 4, _FIRST), worker_events.Fetched(3)) == [
        worker_instructions.BuildStages(3)
    ]
    assert _feed(core, worker_events.Built(3)) == [worker_instructions.AnswerReady(9, "h", 3)]
    start, drop, copy = _feed(core, worker_events.BeginReceived("h", 3))
    assert start == worker_instructions.StartStages(_placed(3))
    assert drop == worker_instructions.DropState((StateEntry(2, 4, _FIRST, StateKind.FETCHED),))
    assert copy == worker_instructions.TakeSnapshot(3, _FIRST)


def test_a_part_that_was_given_up_is_said_when_its_generation_begins() -> None:
    """The holder was away for a moment only here, and has accepted what this device dropped."""
    core = _running()
    _feed(core, _ask(4), worker_events.GenerationStopped((_live(2),)))
    _feed(
        core,
        worker_events.PrepareAsked(9, "h", _placed(4, Version(2, 3)), ()),
        worker_events.Fetched(4),
        worker_events.Built(4),
    )
    _feed(core, worker_events.HolderChanged(worker_events.HolderState.GONE))
    told = [
        worker_instructions.ReportLink("h", 4, "h", back) for back in (False, True)
    ]  # so that it asks at once
    assert _feed(core, worker_events.BeginReceived("h", 4)) == told
    assert core.holdings[0] == _live(2)


def test_fifty_commands_of_another_device_are_refused_however_new() -> None:
    core = _running()
    out = _feed(core, *(_ask(4**n, peer="n") for n in range(1, 51)))
    assert [type(one) for one in out] == [worker_instructions.RefuseCommand] * 50
    assert core.phase is WorkerPhase.RUNNING
    assert core.refused == 50


def test_nobody_stops_the_generation_that_runs_but_for_a_newer_one() -> None:
    core = _running(3)
    [refusal] = _feed(core, _ask(3))
    assert isinstance(refusal, worker_instructions.RefuseCommand)
    assert _feed(core, _ask(4)) == [worker_instructions.StopStages(3)]


def test_a_commit_is_applied_once_and_only_when_ready() -> None:
    core = _running()
    commit = worker_events.CommitReceived("h", 3, 0)
    assert _feed(core, commit) == []
    assert _feed(core, worker_events.RoundOrdered("h", 3, 0, keep=True)) == [
        worker_instructions.QueueRound(3, 0, True)
    ]
    apply = worker_instructions.ApplyUpdate(3, Version(1, 3), None, keep=True)
    assert _feed(core, worker_events.GradientsReady(3, 2, 0), commit, commit) == [apply]
    assert core.refused == 2
    _feed(core, worker_events.Applied(3, 2, Version(1, 3)))
    assert core.holdings == (_live(1),)


def test_commands_of_another_holder_or_generation_change_nothing() -> None:
    core = _running()
    _feed(core, worker_events.GradientsReady(3, 2, 0))
    stale = [
        worker_events.CommitReceived("x", 3, 0),
        worker_events.CommitReceived("h", 2, 0),
        worker_events.RoundOrdered("h", 2, 0),
    ]
    assert _feed(core, *stale, worker_events.BeginReceived("x", 9)) == []
    assert core.refused == 4


def test_an_order_that_overtakes_the_beginning_begins() -> None:
    core = WorkerCore("b")
    own = (Fetch(2, 4, "h"),)
    _feed(
        core,
        _ask(3),
        worker_events.PrepareAsked(1, "h", _placed(3), own),
        worker_events.Fetched(3),
        worker_events.Built(3),
    )
    out = _feed(core, worker_events.RoundOrdered("h", 3, 0))
    assert out[0] == worker_instructions.StartStages(_placed(3))
    assert out[-1] == worker_instructions.QueueRound(3, 0, False)


def test_a_commit_after_the_stop_is_not_applied() -> None:
    core = _running()
    _feed(core, worker_events.GradientsReady(3, 2, 0), _ask(4))
    assert _feed(core, worker_events.CommitReceived("h", 3, 0)) == []
    [answer] = _feed(core, worker_events.GenerationStopped((_live(0, ready=True),)))
    assert answer == worker_instructions.AnswerStateReport(4, "h", 4, (_live(0, ready=True),))


def test_who_is_told_that_it_counts_applies_before_it_answers() -> None:
    core = _running()
    ready = Version(1, 3)
    _feed(core, _ask(4), worker_events.GenerationStopped((_live(0, ready=True),)))
    assert _feed(core, _ask(4, apply=ready)) == [
        worker_instructions.ApplyUpdate(3, ready, None, keep=False)
    ]
    refused = _feed(core, _ask(4, apply=ready))  # asked again before it is done: not applied twice
    assert [type(one) for one in refused] == [worker_instructions.RefuseCommand]
    [answer] = _feed(core, worker_events.Applied(3, 2, ready))
    assert isinstance(answer, worker_instructions.AnswerStateReport)
    assert answer.holdings == (_live(1),)


def test_what_is_torn_is_never_offered() -> None:
    core = _running()
    _feed(
        core,
        _ask(4),
        worker_events.GenerationStopped((_live(0, ready=True),)),
        _ask(4, apply=Version(1, 3)),
    )
    [answer] = _feed(core, worker_events.UpdateTorn(3, 2))
    assert isinstance(answer, worker_instructions.AnswerStateReport)
    assert answer.holdings == ()


def test_an_generation_without_this_device_frees_what_it_trained_but_not_its_copies() -> None:
    core = _running()
    copy = StateEntry(2, 4, _FIRST, StateKind.KEPT)
    _feed(
        core,
        worker_events.SnapshotTaken(2, 4, _FIRST),
        _ask(4),
        worker_events.GenerationStopped((_live(1),)),
    )
    assert _feed(core, worker_events.BeginReceived("h", 4)) == [
        worker_instructions.DropState((_live(1),))
    ]
    assert core.holdings == (copy,)
    assert core.phase is WorkerPhase.IDLE


def test_a_beginning_from_before_the_newest_question_is_ignored() -> None:
    core = _running()
    _feed(core, _ask(9), worker_events.GenerationStopped((_live(1),)))
    assert _feed(core, worker_events.BeginReceived("h", 8)) == []
    assert core.holdings == (_live(1),)


def test_a_question_ends_a_preparation_and_keeps_what_arrived() -> None:
    core = WorkerCore("b")
    part = StateEntry(2, 3, _FIRST, StateKind.FETCHED)
    _feed(core, _ask(3), worker_events.PrepareAsked(7, "h", _placed(3), (Fetch(2, 4, "h"),)))
    _feed(core, worker_events.PartFetched(3, 2, 3, _FIRST))
    refuse, cancel, answer = _feed(core, _ask(4))
    assert (type(refuse), cancel) == (
        worker_instructions.RefuseCommand,
        worker_instructions.CancelPrepare(3),
    )
    assert isinstance(answer, worker_instructions.AnswerStateReport)
    assert answer.holdings == (part,)
    assert _feed(core, worker_events.PartFetched(3, 3, 4, _FIRST), worker_events.Fetched(3)) == []


def test_only_older_copies_go_when_the_holder_names_what_stays() -> None:
    core = _running()
    for step in (4, 8, 12):
        _feed(core, worker_events.SnapshotTaken(2, 4, Version(step, 3)))
    [drop] = _feed(core, worker_events.RetainReceived("h", (Version(8, 3),)))
    assert drop == worker_instructions.DropState((StateEntry(2, 4, Version(4, 3), StateKind.KEPT),))


def test_a_device_parks_with_everything_while_the_holder_is_gone() -> None:
    core = _running()
    assert _feed(core, worker_events.HolderChanged(worker_events.HolderState.GONE)) == [
        worker_instructions.StopStages(3)
    ]
    held = _live(1, ready=True)
    assert _feed(core, worker_events.GenerationStopped((held,))) == [
        worker_instructions.ReportOrphaned("h")
    ]
    assert core.phase is WorkerPhase.PARKED
    assert core.holdings == (held,)
    [answer] = _feed(core, _ask(4))
    assert isinstance(answer, worker_instructions.AnswerStateReport)


def _parked() -> WorkerCore:
    core = _running()
    _feed(
        core,
        worker_events.HolderChanged(worker_events.HolderState.GONE),
        worker_events.GenerationStopped((_live(1, ready=True),)),
    )
    assert core.phase is WorkerPhase.PARKED
    return core


@pytest.mark.parametrize("state", [worker_events.HolderState.LEFT, worker_events.HolderState.GONE])
def test_another_process_of_the_holders_device_ends_nothing(
    state: worker_events.HolderState,
) -> None:
    """A `join` took its place meanwhile, and steps aside for the next `train`, or dies too."""
    core = _parked()
    held = core.holdings
    assert _feed(core, worker_events.HolderChanged(state)) == []
    assert core.holdings == held
    stopping = _running()
    _feed(stopping, worker_events.HolderChanged(worker_events.HolderState.GONE))
    assert _feed(stopping, worker_events.HolderChanged(state)) == []
    assert _feed(stopping, worker_events.GenerationStopped((_live(1),))) == [
        worker_instructions.ReportOrphaned("h")
    ]


def test_each_time_the_holder_is_gone_is_told_once() -> None:
    core = _parked()
    assert _feed(core, worker_events.HolderChanged(worker_events.HolderState.GONE)) == []
    _feed(core, _ask(4))
    assert core.phase is WorkerPhase.STOPPED
    assert _feed(core, worker_events.HolderChanged(worker_events.HolderState.GONE)) == [
        worker_instructions.ReportOrphaned("h")
    ]


def test_a_device_that_keeps_nothing_waits_for_nobody() -> None:
    core = WorkerCore("d")
    _feed(core, _ask(3))
    assert _feed(core, worker_events.HolderChanged(worker_events.HolderState.GONE)) == []
    assert core.phase is WorkerPhase.IDLE


def test_an_generation_that_began_without_it_ends_a_device_s_wait() -> None:
    core = _parked()
    [drop] = _feed(core, worker_events.BeginReceived("h", 9))
    assert isinstance(drop, worker_instructions.DropState)
    assert core.phase is WorkerPhase.IDLE


@pytest.mark.parametrize("state", [worker_events.HolderState.LEFT, worker_events.HolderState.ENDED])
def test_the_end_of_the_job_frees_all(state: worker_events.HolderState) -> None:
    core = _running()
    assert _feed(core, worker_events.HolderChanged(state)) == [worker_instructions.ReleaseJob()]
    assert core.holdings == ()
    assert core.generation == 3
    assert _feed(_parked(), worker_events.HolderChanged(worker_events.HolderState.ENDED)) == [
        worker_instructions.ReleaseJob()
    ]


def test_a_link_that_is_back_is_told_once() -> None:
    core = WorkerCore("b")
    stages = (PlacedStage(0, 2, ("c",)), PlacedStage(2, 4, ("b",)))
    placed = Placement(3, "h", _FIRST, Lineage(), stages)
    _feed(
        core,
        _ask(3),
        worker_events.PrepareAsked(1, "h", placed, ()),
        worker_events.Fetched(3),
        worker_events.Built(3),
    )
    _feed(core, worker_events.BeginReceived("h", 3))
    assert _feed(core, worker_events.LinkStarted("c")) == []
    assert _feed(core, worker_events.LinkEnded("c")) == [
        worker_instructions.ReportLink("h", 3, "c")
    ]
    assert _feed(core, worker_events.LinkStarted("c")) == [
        worker_instructions.ReportLink("h", 3, "c", back=True)
    ]
    assert _feed(core, worker_events.LinkStarted("c")) == []


def test_a_broken_link_is_told_where_it_matters() -> None:
    core = _running()
    assert _feed(core, worker_events.LinkEnded("x"), worker_events.LinkEnded("h")) == []
    other = WorkerCore("h")
    _feed(
        other,
        _ask(3),
        worker_events.PrepareAsked(1, "h", _placed(3), ()),
        worker_events.Fetched(3),
        worker_events.Built(3),
    )
    _feed(other, worker_events.BeginReceived("h", 3))
    assert _feed(other, worker_events.LinkEnded("b")) == []  # the holder sees its own links


def _kept(version: Version) -> worker_events.SnapshotTaken:
    return worker_events.SnapshotTaken(2, 4, version)


def test_a_copy_goes_to_its_keeper_or_to_whom_the_holder_names_instead() -> None:
    core = _running()
    new = Version(4, 3)
    assert _feed(core, _kept(new)) == [worker_instructions.OfferSnapshot("h", 3, 2, 4, new)]
    refused = core.refused
    assert (
        _feed(core, worker_events.BackupPeerAssigned("k", 3, 2, 4, new, "x")) == []
    )  # only the holder says so
    assert core.refused == refused + 1
    assert _feed(core, worker_events.BackupPeerAssigned("h", 3, 2, 4, new, "x")) == [
        worker_instructions.OfferSnapshot("x", 3, 2, 4, new)
    ]
    later = Version(6, 3)
    assert (
        _feed(core, worker_events.BackupPeerAssigned("h", 3, 2, 4, later, "y")) == []
    )  # no copy of that one yet
    assert _feed(core, _kept(later)) == [worker_instructions.OfferSnapshot("y", 3, 2, 4, later)]


def test_what_the_holder_alone_reads_is_offered_to_nobody() -> None:
    """A checkpoint's version, while an older one is on its way to the keepers."""
    core = _running()
    read = Version(4, 3)
    _feed(core, worker_events.RoundOrdered("h", 3, 3, keep=True, stay=(read,), offer=False))
    assert _feed(core, _kept(read)) == []
    assert StateEntry(2, 4, read, StateKind.KEPT) in core.holdings
    later = Version(5, 3)
    _feed(core, worker_events.RoundOrdered("h", 3, 4, keep=True, stay=(read, later)))
    assert _feed(core, _kept(later)) == [worker_instructions.OfferSnapshot("h", 3, 2, 4, later)]


def test_who_copies_for_itself_alone_says_so() -> None:
    """In a group, or where nobody has room: without it a version would not be whole."""
    core = WorkerCore("b")
    stages = (PlacedStage(0, 2, ("h",), "b"), PlacedStage(2, 4, ("b", "c")))
    placed = dataclasses.replace(_placed(3), stages=stages)
    _feed(core, _ask(3))
    _feed(
        core,
        worker_events.PrepareAsked(1, "h", placed, ()),
        worker_events.Fetched(3),
        worker_events.Built(3),
    )
    _feed(core, worker_events.BeginReceived("h", 3))
    new = Version(4, 3)
    assert _feed(core, _kept(new)) == [worker_instructions.ReportSnapshot("h", 3, 2, 4, new)]


def test_a_copy_that_failed_is_told_while_its_generation_runs() -> None:
    core = _running()
    new = Version(4, 3)
    told = worker_instructions.ReportSnapshot("h", 3, 0, 2, new, "no memory")
    assert _feed(core, worker_events.SnapshotFailed(3, 0, 2, new, "no memory")) == [told]
    assert _feed(core, worker_events.SnapshotFailed(2, 0, 2, new, "no memory")) == []


def test_only_who_trains_or_is_about_to_reads_copies_for_others() -> None:
    offered = worker_events.OfferReceived("h", 3, 0, 2, Version(4, 3))
    collect = worker_instructions.CollectSnapshot("h", 3, 0, 2, Version(4, 3))
    core = _running()
    assert _feed(core, offered) == [collect]
    assert (
        _feed(core, worker_events.OfferReceived("h", 3, 2, 4, Version(4, 3))) == []
    )  # not its stage
    _feed(core, _ask(4))
    assert _feed(core, offered) == []
    _feed(core, worker_events.GenerationStopped((_live(0),)))
    assert _feed(core, offered) == []
    _feed(core, worker_events.PrepareAsked(2, "h", _placed(5), ()))
    early = worker_events.OfferReceived("h", 5, 0, 2, Version(4, 3))
    assert _feed(core, early) == [worker_instructions.CollectSnapshot("h", 5, 0, 2, Version(4, 3))]
    whole = worker_events.SnapshotCollected(5, 0, 2, Version(4, 3))
    assert _feed(core, whole) == [
        worker_instructions.ReportSnapshot("h", 5, 0, 2, Version(4, 3), None)
    ]
    _feed(
        core,
        worker_events.Fetched(5),
        worker_events.Built(5),
        worker_events.BeginReceived("h", 5),
        worker_events.BeginReceived("h", 6),
    )
    assert _feed(core, early) == []  # a generation without it has begun


def test_a_copy_that_is_ready_after_the_end_of_the_job_is_not_kept() -> None:
    """Else the holder's next process would hear that its job continues here."""
    core = _running()
    _feed(core, worker_events.HolderChanged(worker_events.HolderState.ENDED))
    assert (
        _feed(core, _kept(Version(4, 3)), worker_events.SnapshotCollected(3, 0, 2, Version(4, 3)))
        == []
    )
    assert core.holdings == ()


_LOST = Rebuild("b", 0, 0, 2, 3, Version(2, 3), Version(5, 3))


def _asked_to_make(
    request: int = 4,
) -> tuple[WorkerCore, list[worker_instructions.DeviceInstruction]]:
    core = _running()
    asked = worker_events.StateReportAsked(request, "h", request, rebuild=_LOST)
    return core, _feed(core, asked, worker_events.GenerationStopped((_live(5),)))


def test_a_lost_stage_is_made_before_the_answer() -> None:
    core, out = _asked_to_make()
    assert out == [worker_instructions.StopStages(3), worker_instructions.RebuildStage(4, _LOST)]
    [answer] = _feed(core, worker_events.RebuildDone(4, _LOST, is_here=True))
    made = StateEntry(0, 2, Version(5, 3), StateKind.FETCHED)
    assert answer == worker_instructions.AnswerStateReport(4, "h", 4, (_live(5), made))
    # it stays for the generation that begins with it
    [fetch] = _feed(core, worker_events.PrepareAsked(9, "h", _placed(4, Version(5, 3)), ()))
    assert isinstance(fetch, worker_instructions.FetchParts)


def test_who_could_not_make_it_answers_with_what_there_is() -> None:
    core, _ = _asked_to_make()
    [answer] = _feed(core, worker_events.RebuildDone(4, _LOST, is_here=False))
    assert answer == worker_instructions.AnswerStateReport(4, "h", 4, (_live(5),))


def test_the_next_question_ends_the_making() -> None:
    core, _ = _asked_to_make()
    refuse, cancel, answer = _feed(core, _ask(5))
    assert refuse == worker_instructions.RefuseCommand(4, "h", "asked again since")
    assert cancel == worker_instructions.CancelRebuild()
    assert isinstance(answer, worker_instructions.AnswerStateReport)
    assert (
        _feed(core, worker_events.RebuildDone(4, _LOST, is_here=True)) == []
    )  # nobody waits for it


def test_the_end_of_the_job_ends_the_making() -> None:
    core, _ = _asked_to_make()
    assert _feed(core, worker_events.HolderChanged(worker_events.HolderState.ENDED)) == [
        worker_instructions.ReleaseJob()
    ]
    assert _feed(core, worker_events.RebuildDone(4, _LOST, is_here=True)) == []
