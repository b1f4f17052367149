"""Whether lost stages can be rebuilt at the newest version, instead of going back.

A stage's backup peer has a snapshot of it, some steps old. Its neighbours still have what they sent
to it since, and the holder can read the samples again; so the peer alone repeats those steps with
the same inputs, and has what was lost, to the last bit. No other device goes back:

    stage 0   live at 40 ── activations of steps 30 to 39 ──┐
    stage 1   lost; stage 2 keeps its snapshot at 30 ───────┴─► 30 ──► 40
    stage 2   live at 40 ── gradients of steps 30 to 39 ────┘

The peer must compute with what the lost device computed with (`compute_kind.py`); with something
else the last bits would be others, and all go back to the snapshot instead.

The logging of Wang et al., "Swift: Expedited Failure Recovery for Large-scale DNN Training" (2023),
without storage: what was sent stays where it was made. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from p2ptrain.net.fields import FrameFields, check_units
from p2ptrain.net.forms import Count, Id
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.state_report import StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Lineage, Version, VersionRow

_COPIES = (StateKind.FETCHED, StateKind.KEPT, StateKind.REPLICA)


@dataclass(frozen=True, slots=True)
class Rebuild(FrameFields):
    """`device` takes units [first, end) from one version to another.

    Attributes:
        stage: their number in the plan of `generation`.
        generation: the one that computed `target`, which all others have.
        version: of the copy that it begins with.
    """

    device: Id
    stage: Count
    first: Count
    end: Count
    generation: Count
    version: VersionRow
    target: VersionRow

    def __post_init__(self) -> None:
        check_units(self.first, self.end)
        if self.version.step >= self.target.step or self.target.computed != self.generation:
            raise ValueError("a stage is rebuilt from an older version to one of its generation")


def plan_rebuilds(
    units: int,
    state_reports: Mapping[str, StateReport],
    lineage: Lineage,
    present: Placement | None,
    least_steps: int = HOME.rebuild_min_steps,
) -> tuple[Rebuild, ...]:
    """What must be rebuilt so that all units are there at the newest version.

    Args:
        units: of the model.
        state_reports: by device, of those that answered.
        present: the plan that was in force.
        least_steps: from a copy to now; for fewer nothing is rebuilt.

    Returns:
        One for each stage that is lost; none where one of them cannot be made.
    """
    target = newest_live(state_reports.values(), lineage)
    if present is None or target is None or target.computed != present.generation:
        return ()
    held = _held_at(target, state_reports)
    missing = set(range(units)) - held
    found: dict[str, Rebuild] = {}  # by device: each makes one
    for index, stage in enumerate(present.stages):
        if not missing.intersection(range(stage.first, stage.end)):
            continue
        if len(stage.devices) > 1:
            return ()  # its gradients were summed with others', and those are gone
        since = _since(index, state_reports, present, target)
        free = {
            one: state_report for one, state_report in state_reports.items() if one not in found
        }
        copies = (
            (device, entry.version)
            for device, entry in _copies(stage, free, lineage, present)
            if max(since, _logged(state_reports[device], present.generation, target))
            <= entry.version.step
            <= target.step - least_steps
        )
        best = max(copies, key=lambda copy: copy[1].step, default=None)
        if best is None:
            return ()
        device, version = best
        units_of = (stage.first, stage.end)
        found[device] = Rebuild(device, index, *units_of, present.generation, version, target)
    return tuple(found.values())


def newest_live(state_reports: Iterable[StateReport], lineage: Lineage) -> Version | None:
    """The newest version in training on any device."""
    return max(
        (
            entry.version
            for state_report in state_reports
            for entry in state_report.entries
            if entry.kind is StateKind.LIVE and lineage.is_valid(entry.version)
        ),
        default=None,
    )


def _held_at(version: Version, state_reports: Mapping[str, StateReport]) -> set[int]:
    return {
        unit
        for state_report in state_reports.values()
        for entry in state_report.entries
        if entry.version == version
        for unit in range(entry.first, entry.end)
    }


def _since(
    index: int, state_reports: Mapping[str, StateReport], present: Placement, target: Version
) -> int:
    """From which step on the neighbours of a stage have all that they sent to it."""
    near = [present.stages[q] for q in (index - 1, index + 1) if 0 <= q < len(present.stages)]
    senders = {device for neighbour in near for device in neighbour.devices}
    if not senders <= state_reports.keys():
        return target.step
    return max(
        (_logged(state_reports[one], present.generation, target) for one in senders), default=0
    )


def _copies(
    stage: PlacedStage,
    state_reports: Mapping[str, StateReport],
    lineage: Lineage,
    present: Placement,
) -> Iterator[tuple[str, StateEntry]]:
    """Who has exactly this stage, as the plan's generation began with it or computed it; by id.

    Of devices that compute as the stage's did.
    """
    kind = stage.kind_of(stage.devices[0])
    alike = [one for one in sorted(state_reports) if state_reports[one].compute.kind == kind]
    for device in alike:
        for entry in state_reports[device].entries:
            version = entry.version
            is_its = version.computed == present.generation or version == present.version
            is_whole = (entry.first, entry.end) == (stage.first, stage.end)
            if entry.kind in _COPIES and is_whole and is_its and lineage.is_valid(version):
                yield device, entry


def _logged(state_report: StateReport, generation: int, target: Version) -> int:
    """From which step on it has all that it sent and was ordered in that generation."""
    logged = state_report.logged
    return logged.since if logged is not None and logged.generation == generation else target.step


MIN_LIMIT_BYTES = 24 << 20
"""What a device may keep, however little the plan takes there."""

SHARE = 20
"""More where the plan takes more: so many parts of what it takes are one for this."""


def replay_log_bytes(planned_bytes: int, most_bytes: int | None = None) -> int:
    """What may be kept where a plan takes so much.

    Args:
        most_bytes: of the host's memory, where the plan takes that of it.
    """
    share = planned_bytes // SHARE
    return max(MIN_LIMIT_BYTES, share if most_bytes is None else min(share, most_bytes))
