"""Planted bugs: each a small override of one rule. The simulator must find every one."""

from __future__ import annotations

import dataclasses

from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.cores.holder_core import HolderCore
from p2ptrain.recovery.cores.job_history import ReportedProgress, ReportOnce
from p2ptrain.recovery.cores.reconfigure_core import ChangeCore
from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.snapshot_tracker import KeepingResult, SnapshotTracker
from p2ptrain.recovery.state_report import StageCopy, StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Version
from tests.simulation.recovery.holder import Holder
from tests.simulation.recovery.node import Node, Seat
from tests.simulation.recovery.run import Build


class AppliesInAnyGeneration(WorkerCore):
    """Takes a commit of whatever generation for the one that runs."""

    def commit(
        self, peer: str, generation: int, step: int, coefficient: Coefficient | None = None
    ) -> None:
        if self._trained:
            assert self.running is not None
            version = Version(step + 1, self.running.generation)
            self._port.apply_update(self.running.generation, version, None, keep=False)


class AppliesWhenOrdered(Node):
    """Does not wait for the commit."""

    def _check_ready(self, seat: Seat, generation: int) -> None:
        was_ready = seat.ready
        super()._check_ready(seat, generation)
        if seat.ready is not None and was_ready is None:
            self.apply_update(generation, seat.ready, None, keep=False)


class ObeysAnyCommand(WorkerCore):
    """Stops and prepares for whatever number comes."""

    def _obeys(self, request: int, peer: str, generation: int) -> bool:
        self.holder, self.generation = peer, generation
        return True


class ForgetsWhenParked(WorkerCore):
    """Frees what it trained when the holder dies."""

    def _rest(self) -> None:
        self._free_live()
        self._copies.drop({StateKind.KEPT, StateKind.REPLICA})
        super()._rest()


class SendsTheNewest(Node):
    """Does not look at which step of a lost stage is done again."""

    def logged(self, generation: int, stage: int, what: str, step: int) -> int | None:
        keys = [key for key in self.log.numbers if key[:2] == (stage, what)]
        return self.log.numbers[max(keys)] if keys else None


class DropsTooEarly(WorkerCore):
    """Frees the version to go back to as soon as it has copied a newer one."""

    def copied(self, first: int, end: int, version: Version) -> None:
        super().copied(first, end, version)
        self._copies.keep_only([version])


class AnswersWithoutStopping(Node):
    """Does not wait for what has begun in the compute thread."""

    flushes = False


class AnswersWithoutStoppingHolder(Holder):
    """The same, at the holder."""

    flushes = False


class ReadsAnyVersion(Node):
    """Gives whatever it has of a unit, whatever was asked for."""

    def state(self, unit: int, version: Version) -> int | None:
        for entry, states in self.copies.items():
            if entry.has(unit):
                return states[unit - entry.first]
        return super().state(unit, version)


class AcknowledgesEarly(Node):
    """Says that a copy is whole when its first unit has come."""

    def _collect(self, peer: str, copy: StageCopy) -> None:
        self.feed(self.core.collected, copy)


class TrustsTheFirst(SnapshotTracker):
    """Takes a version for whole when the first device has a copy."""

    def ordered(self, version: Version) -> bool:
        offered = super().ordered(version)
        for missing in self._missing.values():
            while len(missing) > 1:
                missing.pop()
        return offered

    def acknowledged(
        self, device: str, copy: StageCopy, failed: str | None = None
    ) -> list[KeepingResult]:
        for missing in self._missing.values():
            stage = self._stage_of(copy)
            if stage is not None:
                missing.clear()
                missing.add((stage, device))
        return super().acknowledged(device, copy, failed)


class TrustsTheFirstHolder(Holder):
    """The same, at the holder."""

    keeping_type = TrustsTheFirst


class RollsForwardAlone(ChangeCore):
    """Has the one that is ready apply, though nobody has."""

    def state_reported(self, generation: int, report: StateReport) -> None:
        super().state_reported(generation, _applied(report))


def _applied(state_report: StateReport) -> StateReport:
    """As if every update that is ready had been applied somewhere."""
    proof = tuple(
        StateEntry(entry.first, entry.end, entry.ready, StateKind.LIVE)
        for entry in state_report.entries
        if entry.ready is not None
    )
    return dataclasses.replace(state_report, entries=state_report.entries + proof)


class MixesHistories(ChangeCore):
    """Takes a step for a version, whichever device computed it."""

    def state_reported(self, generation: int, report: StateReport) -> None:
        merged = tuple(self._merged(entry) for entry in report.entries)
        super().state_reported(generation, dataclasses.replace(report, entries=merged))

    def _merged(self, entry: StateEntry) -> StateEntry:
        eras = self._ask.past.lineage.eras
        computed = max(
            (era.generation for era in eras if era.start < entry.version.step), default=0
        )
        version = Version(entry.version.step, computed)
        return dataclasses.replace(entry, version=version, ready=None)


class GivesAnyHistory(Node):
    """Gives a unit at a step, whichever device computed it."""

    def state(self, unit: int, version: Version) -> int | None:
        for entry, states in self.copies.items():
            if entry.has(unit) and entry.version.step == version.step:
                return states[unit - entry.first]
        for seat in self.seats.values():
            if seat.version.step == version.step and seat.first <= unit < seat.end:
                return seat.states[unit - seat.first]
        return None


class ReusesGenerationNumbers(HolderCore):
    """Does not write down which generation numbers it has given away."""

    def _write_down(self) -> None:
        placed = self.history.placed
        self.history.next_generation = (placed.generation if placed else 0) + 1
        super()._write_down()


class ReportsAgain(Holder):
    """Forgets at every generation what people have heard."""

    def begin(self, placed: Placement, reason: ReconfigureReason, alive: frozenset[str]) -> None:
        self.once = ReportOnce(ReportedProgress(placed.version.step))
        super().begin(placed, reason, alive)


class CommitsFirst(Holder):
    """Sends the commit before the journal has it."""

    def _decide(self, placed: Placement, step: int) -> None:
        self._commit(placed, step)
        super()._decide(placed, step)


class SkipsAStep(Holder):
    """Goes on one round too late."""

    def begin(self, placed: Placement, reason: ReconfigureReason, alive: frozenset[str]) -> None:
        super().begin(placed, reason, alive)
        self.ordered += 1


_DEVICE = (
    AppliesInAnyGeneration,
    ObeysAnyCommand,
    ForgetsWhenParked,
    DropsTooEarly,
)
MUTANTS: dict[str, Build] = (
    {mutant.__name__: Build(device_core=mutant) for mutant in _DEVICE}
    | {
        m.__name__: Build(node=m)
        for m in (AppliesWhenOrdered, ReadsAnyVersion, AcknowledgesEarly, SendsTheNewest)
    }
    | {
        "AnswersWithoutStopping": Build(
            node=AnswersWithoutStopping, holder=AnswersWithoutStoppingHolder
        )
    }
    | {"TrustsTheFirst": Build(holder=TrustsTheFirstHolder)}
    | {m.__name__: Build(change_core=m) for m in (RollsForwardAlone,)}
    | {"MixesHistories": Build(node=GivesAnyHistory, change_core=MixesHistories)}
    | {m.__name__: Build(holder_core=m) for m in (ReusesGenerationNumbers,)}
    | {m.__name__: Build(holder=m) for m in (ReportsAgain, CommitsFirst, SkipsAStep)}
)
