"""From which version training resumes, once the state reports are known.

The newest version of this job's history that is whole: every unit of it is on some living device.

A device may have applied an update that others have not, because the commit reached only some. The
update counts (`commit`), so the others apply it first and report again:

    a  LIVE 7                      b  LIVE 6, ready for 7         c  LIVE 6, ready for 7
    ──► RollForward(b, c)          b  LIVE 7                      c  LIVE 7        ──► version 7
    where c is dead: its units are whole at the snapshot 4 only                    ──► version 4

Where going back would repeat more than a few steps on every device, the lost stage alone is
rebuilt, if it can be (`rebuild_plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.rebuild_plan import Rebuild, plan_rebuilds
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.state_report import StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Lineage, Version

_PREFERENCE = (
    StateKind.LIVE,
    StateKind.FETCHED,
    StateKind.KEPT,
    StateKind.REPLICA,
    StateKind.GLOBAL,
    StateKind.INITIAL,
)

_KEPT = (StateKind.LIVE, StateKind.FETCHED, StateKind.KEPT, StateKind.REPLICA)


@dataclass(frozen=True, slots=True)
class FullSnapshot:
    """All units at one version at one device. The first weights, or a checkpoint, at the holder.

    Attributes:
        kind: INITIAL or GLOBAL.
        most_replayed: most steps it is worth doing again for it; None = any number.
    """

    version: Version
    device: str
    kind: StateKind
    most_replayed: int | None = None


@dataclass(frozen=True, slots=True)
class KnownPast:
    """What is known beside the state reports.

    Attributes:
        lineage: of the job.
        reported: updates that were reported.
        copies: whole copies, each at one device.
        places: by device, the ranges of units that it trained or kept for others; says where units
            were that are nowhere now.
        silent: devices that may come back as they were: unplugged, frozen, out of reach.
        took_part: devices that had a part in any generation of the lineage, and have not ended
            since.
        clips: whether updates need a clipping coefficient.
        most_step: no device can have made more updates; None = that is not known.
        asynchronous: stages update by themselves, so that all may have a version that was
            not reported: training resumes from what was reported, so that no step is left out.
    """

    lineage: Lineage
    reported: int
    copies: tuple[FullSnapshot, ...] = ()
    places: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    took_part: frozenset[str] = frozenset()
    clips: bool = False
    asynchronous: bool = False
    most_step: int | None = None

    def counts(self, version: Version) -> bool:
        """Whether training may go on from it."""
        is_reported = not self.asynchronous or version.step <= self.reported
        return is_reported and self.lineage.is_valid(version)


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """Go on from `version`.

    Attributes:
        places: by unit, ids of the devices that have it at `version`, the best first.
        replayed: steps that were reported and are computed again.
        reason: for logs.
    """

    version: Version
    places: tuple[tuple[str, ...], ...]
    replayed: int
    reason: str


@dataclass(frozen=True, slots=True)
class RollForward:
    """First these devices apply the update that they have the gradients of, then ask them again.

    Attributes:
        devices: in the order of their ids.
        version: what they have then.
        coefficient: what clipping multiplies their gradients with, as `StateEntry` has it.
    """

    devices: tuple[str, ...]
    version: Version
    coefficient: tuple[float, str] | None


@dataclass(frozen=True, slots=True)
class StateLost:
    """No version is whole.

    Attributes:
        units: those that are nowhere, at the version that lacks fewest.
        last_places: ids of the devices that had them, or that may still have an older version.
        certain: they will not be back: every last place ended or came back empty.
        reason: for the user, without the names of devices.
    """

    units: tuple[int, ...]
    last_places: tuple[str, ...]
    certain: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RebuildFirst:
    """First these are done, then their devices are asked again."""

    rebuilds: tuple[Rebuild, ...]


def choose_version(
    units: int,
    state_reports: Mapping[str, StateReport],
    past: KnownPast,
    present: Placement | None = None,
    least_steps: int = HOME.rebuild_min_steps,
) -> RollForward | RebuildFirst | VersionChoice | StateLost:
    """Decide.

    Arguments:
        units: of the model.
        state_reports: by device, of those that answered; only they have anything.
        present: the plan that was in force, where lost stages may be rebuilt.
        least_steps: that all would go back, where a stage is rebuilt for them.
    """
    forward = roll_forward(state_reports.values(), past)
    if forward is not None:
        return forward
    whole = _newest_whole(units, state_reports, past)
    if whole is None or whole.replayed >= least_steps:
        rebuilds = plan_rebuilds(units, state_reports, past.lineage, present, least_steps)
        if rebuilds and (
            whole is None or rebuilds[0].target.step - whole.version.step >= least_steps
        ):
            return RebuildFirst(rebuilds)
    return whole or _lost(units, state_reports, past)


def roll_forward(state_reports: Iterable[StateReport], past: KnownPast) -> RollForward | None:
    """Devices that are ready for an update that another has applied.

    Where the job clips, only a device that still knows the coefficient can help: the same update
    with another one would give the same version another content.
    """
    live = [
        (state_report.device, entry)
        for state_report in state_reports
        for entry in state_report.entries
        if entry.kind is StateKind.LIVE and past.lineage.is_valid(entry.version)
    ]
    if not live:
        return None
    newest = max(entry.version for _, entry in live)
    behind = {device for device, entry in live if entry.ready == newest}
    known = {entry.coefficient for _, entry in live if entry.version == newest}
    coefficient = max((one for one in known if one is not None), default=None)
    if not behind or (past.clips and coefficient is None):
        return None
    return RollForward(tuple(sorted(behind)), newest, coefficient)


def _newest_whole(
    units: int, state_reports: Mapping[str, StateReport], past: KnownPast
) -> VersionChoice | None:
    offered = {
        copy.version
        for copy in past.copies
        if copy.device in state_reports and _is_worth_it(copy, past.reported)
    }
    for version in sorted(_candidates(state_reports, past) | offered, reverse=True):
        copies = [copy for copy in past.copies if copy.version == version]
        places = _places(units, version, state_reports, copies)
        if all(places):
            replayed = max(0, past.reported - version.step)
            reason = f"version {version.step} is the newest that is whole, {replayed} steps back"
            return VersionChoice(version, places, replayed, reason)
    return None


def _is_worth_it(copy: FullSnapshot, reported: int) -> bool:
    return copy.most_replayed is None or reported - copy.version.step <= copy.most_replayed


def _candidates(state_reports: Mapping[str, StateReport], past: KnownPast) -> set[Version]:
    """What devices have of this history. Whole copies are offered, and stand for themselves."""
    return {
        entry.version
        for entry in _all(state_reports)
        if entry.kind in _KEPT and past.counts(entry.version)
    }


def _all(state_reports: Mapping[str, StateReport]) -> Iterator[StateEntry]:
    for state_report in state_reports.values():
        yield from state_report.entries


def _places(
    units: int,
    version: Version,
    state_reports: Mapping[str, StateReport],
    copies: Sequence[FullSnapshot],
) -> tuple[tuple[str, ...], ...]:
    """By unit, who has it at `version`: a version has one content, so any entry of it will do."""
    ranked: list[dict[str, int]] = [{} for _ in range(units)]

    def put(device: str, first: int, end: int, kind: StateKind) -> None:
        rank = _PREFERENCE.index(kind)
        for unit in range(max(first, 0), min(end, units)):
            ranked[unit][device] = min(rank, ranked[unit].get(device, rank))

    for device, state_report in state_reports.items():
        for entry in state_report.entries:
            if entry.version == version:
                put(device, entry.first, entry.end, entry.kind)
    for copy in copies:
        if copy.device in state_reports:
            put(copy.device, 0, units, copy.kind)
    return tuple(tuple(sorted(by, key=lambda device: (by[device], device))) for by in ranked)


def _lost(units: int, state_reports: Mapping[str, StateReport], past: KnownPast) -> StateLost:
    """What is missing, at the version that lacks fewest units; of equals the newest."""
    missing = tuple(range(units))
    for version in sorted(_candidates(state_reports, past), reverse=True):
        copies = [copy for copy in past.copies if copy.version == version]
        places = _places(units, version, state_reports, copies)
        lacks = tuple(unit for unit, held in enumerate(places) if not held)
        if lacks and len(lacks) < len(missing):
            missing = lacks
    had = {
        device
        for device, ranges in past.places.items()
        if any(first <= unit < end for first, end in ranges for unit in missing)
        and not _still_has(state_reports.get(device), missing)
    }
    # a device that fell silent in an earlier generation may have all that an older version needs
    last = sorted(had | (past.silent & past.took_part))
    return StateLost(missing, tuple(last), not past.silent.intersection(last), _why(missing, past))


def _still_has(state_report: StateReport | None, missing: Sequence[int]) -> bool:
    entries = state_report.entries if state_report is not None else ()
    return any(entry.has(unit) for entry in entries for unit in missing)


def _why(missing: Sequence[int], past: KnownPast) -> str:
    units = f"layers {missing[0]} to {missing[-1]}" if len(missing) > 1 else f"layer {missing[0]}"
    if not past.copies:
        return (
            f"{units} of the model are lost with the devices that had them, and no device has the "
            "first weights or a checkpoint"
        )
    newest = max(copy.version.step for copy in past.copies)
    return (
        f"{units} of the model are lost with the devices that had them, and the newest complete "
        f"copy is of step {newest}, {past.reported - newest} steps back"
    )
