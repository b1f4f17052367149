"""From which version training continues."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.choose_version import (
    FullSnapshot,
    KnownPast,
    RollForward,
    StateLost,
    VersionChoice,
    choose_version,
)
from p2ptrain.recovery.state_report import StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Era, Lineage, Version

_ONE_GENERATION = Lineage((Era(1, 0, 0),))
_HALVES = {"a": (0, 2), "b": (2, 4)}


def _v(step: int, computed: int = 1) -> Version:
    return Version(step, computed)


def _live(first: int, end: int, step: int, *, ready: bool = False) -> StateEntry:
    return StateEntry(first, end, _v(step), StateKind.LIVE, _v(step + 1) if ready else None)


def _reports(**entries: list[StateEntry]) -> dict[str, StateReport]:
    return {device: StateReport(device, entries=tuple(own)) for device, own in entries.items()}


def test_all_at_one_version_goes_on_there() -> None:
    state_reports = _reports(a=[_live(0, 2, 7, ready=True)], b=[_live(2, 4, 7)])
    choice = choose_version(4, state_reports, KnownPast(_ONE_GENERATION, reported=7))
    assert isinstance(choice, VersionChoice)
    assert (choice.version, choice.replayed) == (_v(7), 0)
    assert choice.places == (("a",), ("a",), ("b",), ("b",))


def test_without_a_barrier_what_nobody_knew_of_is_not_gone_on_with() -> None:
    """All stages may have made an update that the holder has not heard of from each of them."""
    kept = {device: StateEntry(*units, _v(5), StateKind.KEPT) for device, units in _HALVES.items()}
    state_reports = _reports(**{d: [_live(*_HALVES[d], 7), kept[d]] for d in _HALVES})
    for reported, version in ((6, 5), (7, 7)):
        past = KnownPast(_ONE_GENERATION, reported=reported, asynchronous=True)
        choice = choose_version(4, state_reports, past)
        assert isinstance(choice, VersionChoice)
        assert (choice.version, choice.replayed) == (_v(version), reported - version)


def test_stages_at_different_versions_are_no_version() -> None:
    """As asynchronous stages are, at any moment: only their copies are a cut."""
    kept = {device: StateEntry(*units, _v(5), StateKind.KEPT) for device, units in _HALVES.items()}
    state_reports = _reports(a=[_live(0, 2, 7), kept["a"]], b=[_live(2, 4, 8), kept["b"]])
    choice = choose_version(
        4, state_reports, KnownPast(_ONE_GENERATION, reported=7, asynchronous=True)
    )
    assert isinstance(choice, VersionChoice)
    assert choice.version == _v(5)


def test_who_is_ready_for_what_another_has_applied_applies_it_first() -> None:
    applied = StateEntry(0, 2, _v(7), StateKind.LIVE, None, (0.5, "torch.float32"))
    state_reports = _reports(
        a=[applied], b=[_live(2, 3, 6, ready=True)], c=[_live(3, 4, 6, ready=True)]
    )
    forward = choose_version(4, state_reports, KnownPast(_ONE_GENERATION, reported=7, clips=True))
    assert forward == RollForward(("b", "c"), _v(7), (0.5, "torch.float32"))


def test_nobody_applied_so_being_ready_means_nothing() -> None:
    state_reports = _reports(a=[_live(0, 2, 6, ready=True)], b=[_live(2, 4, 6, ready=True)])
    choice = choose_version(4, state_reports, KnownPast(_ONE_GENERATION, reported=6))
    assert isinstance(choice, VersionChoice)
    assert choice.version == _v(6)


def test_without_the_clipping_coefficient_nobody_applies() -> None:
    state_reports = _reports(a=[_live(0, 4, 7)], b=[_live(2, 4, 6, ready=True)])
    assert isinstance(
        choose_version(4, state_reports, KnownPast(_ONE_GENERATION, reported=7, clips=True)),
        VersionChoice,
    )
    assert isinstance(
        choose_version(4, state_reports, KnownPast(_ONE_GENERATION, reported=7)), RollForward
    )


def test_gradients_of_another_generation_are_not_the_update_that_somebody_applied() -> None:
    lineage = Lineage((Era(1, 0, 0), Era(2, 6, 1)))
    applied = StateEntry(0, 4, Version(7, 2), StateKind.LIVE)
    state_reports = _reports(a=[applied], b=[_live(2, 4, 6, ready=True)])
    choice = choose_version(4, state_reports, KnownPast(lineage, reported=7))
    assert isinstance(choice, VersionChoice)
    assert choice.version == Version(7, 2)


def test_a_death_goes_back_to_the_newest_version_that_is_whole() -> None:
    state_reports = _reports(
        a=[
            _live(0, 2, 7),
            StateEntry(0, 2, _v(4), StateKind.KEPT),
            StateEntry(0, 2, _v(6), StateKind.KEPT),
        ],
        b=[
            _live(2, 3, 7),
            StateEntry(2, 3, _v(4), StateKind.KEPT),
            StateEntry(3, 4, _v(4), StateKind.REPLICA),
        ],
    )
    choice = choose_version(4, state_reports, KnownPast(_ONE_GENERATION, reported=7))
    assert isinstance(choice, VersionChoice)
    assert (choice.version, choice.replayed) == (_v(4), 3)
    assert choice.places[3] == ("b",)


def test_a_version_of_an_abandoned_history_is_not_mixed_in() -> None:
    lineage = Lineage((Era(1, 0, 0), Era(2, 4, 1)))
    state_reports = _reports(
        a=[
            StateEntry(0, 2, Version(6, 2), StateKind.LIVE),
            StateEntry(0, 2, _v(4), StateKind.KEPT),
        ],
        b=[StateEntry(2, 4, _v(6), StateKind.LIVE), StateEntry(2, 4, _v(4), StateKind.KEPT)],
    )
    choice = choose_version(4, state_reports, KnownPast(lineage, reported=7))
    assert isinstance(choice, VersionChoice)
    assert choice.version == _v(4)


def test_the_first_weights_serve_while_little_must_be_done_again() -> None:
    first = FullSnapshot(Version(0, 0), "a", StateKind.INITIAL, most_replayed=5)
    state_reports = _reports(a=[_live(0, 2, 5)])
    choice = choose_version(
        4, state_reports, KnownPast(_ONE_GENERATION, reported=5, copies=(first,))
    )
    assert isinstance(choice, VersionChoice)
    assert (choice.version, choice.replayed) == (Version(0, 0), 5)
    lost = choose_version(4, state_reports, KnownPast(_ONE_GENERATION, reported=6, copies=(first,)))
    assert isinstance(lost, StateLost)
    assert "step 0, 6 steps back" in lost.reason


def test_a_first_plan_starts_from_the_first_weights() -> None:
    first = FullSnapshot(Version(0, 0), "a", StateKind.INITIAL)
    choice = choose_version(
        3, _reports(a=[], b=[]), KnownPast(Lineage(), reported=0, copies=(first,))
    )
    assert isinstance(choice, VersionChoice)
    assert choice.places == (("a",),) * 3


def test_what_is_lost_is_named_and_only_silence_leaves_hope() -> None:
    state_reports = _reports(a=[_live(0, 2, 7)], c=[])
    places = {"a": ((0, 2),), "b": ((2, 4),), "c": ((3, 4),)}
    lost = choose_version(
        4, state_reports, KnownPast(_ONE_GENERATION, 7, places=places, silent=frozenset({"b"}))
    )
    assert lost == StateLost(
        (2, 3), ("b", "c"), False, lost.reason if isinstance(lost, StateLost) else ""
    )
    parts = frozenset({"a", "d"})  # d of an earlier plan: it may have an older version
    old = choose_version(
        4,
        state_reports,
        KnownPast(_ONE_GENERATION, 7, places=places, silent=parts - {"a"}, took_part=parts),
    )
    assert isinstance(old, StateLost)
    assert (old.last_places, old.certain) == (("b", "c", "d"), False)
    gone = choose_version(4, state_reports, KnownPast(_ONE_GENERATION, 7, places=places))
    assert isinstance(gone, StateLost)
    assert gone.certain


_UNITS = 3
_VERSIONS = [Version(step, computed) for step, computed in product(range(4), range(4))]
_HOLDING = st.builds(
    lambda first, size, version, kind, ready: StateEntry(
        first,
        min(first + size, _UNITS),
        version,
        kind,
        Version(version.step + 1, ready) if ready and kind is StateKind.LIVE else None,
    ),
    st.integers(0, _UNITS - 1),
    st.integers(1, _UNITS),
    st.sampled_from(_VERSIONS),
    st.sampled_from([StateKind.LIVE, StateKind.KEPT, StateKind.REPLICA, StateKind.FETCHED]),
    st.integers(0, 3),
)
_STOCK = st.dictionaries(st.sampled_from("abc"), st.lists(_HOLDING, max_size=4), min_size=1)
_LINEAGES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=3).map(
    lambda starts: Lineage(tuple(Era(i, s, min(o, i - 1)) for i, (s, o) in enumerate(starts, 1)))
)


@given(_STOCK, _LINEAGES, st.booleans())
def test_as_trying_every_version_would(
    entries: dict[str, list[StateEntry]], lineage: Lineage, offered: bool
) -> None:
    copies = (FullSnapshot(Version(1, 0), "a", StateKind.GLOBAL),) if offered else ()
    state_reports = _reports(**entries)
    past = KnownPast(lineage, reported=4, copies=copies)
    everything = [(device, entry) for device, own in entries.items() for entry in own]
    valid = [entry for _, entry in everything if lineage.is_valid(entry.version)]
    newest_live = max((h.version for h in valid if h.kind is StateKind.LIVE), default=None)
    whole = [
        version
        for version in _VERSIONS
        if (
            lineage.is_valid(version)
            and any(h.version == version for h in valid)
            and all(
                any(h.version == version and h.has(u) for _, h in everything) for u in range(_UNITS)
            )
        )
        or (offered and version == Version(1, 0) and "a" in state_reports)
    ]
    answer = choose_version(_UNITS, state_reports, past)
    match answer:
        case RollForward(devices, version):
            assert version == newest_live
            assert devices
            assert all(
                any(h.ready == version and lineage.is_valid(h.version) for h in entries[device])
                for device in devices
            )
        case VersionChoice(version, places):
            assert version == max(whole)
            for unit, devices in enumerate(places):
                assert devices
                for device in devices:
                    has = any(h.version == version and h.has(unit) for h in entries[device])
                    assert has or (offered and device == "a")
        case StateLost():
            assert not whole
