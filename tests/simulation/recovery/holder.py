"""The data holder's shell in the simulator: rounds, commits, the journal, what people hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate

from p2ptrain.errors import ProtocolError
from p2ptrain.recovery import snapshot_tracker
from p2ptrain.recovery.choose_version import FullSnapshot, StateLost
from p2ptrain.recovery.commit import CommitTracker
from p2ptrain.recovery.cores.holder_core import HolderCore
from p2ptrain.recovery.cores.holder_port import HolderPhase, P, PortCall
from p2ptrain.recovery.cores.job_history import NotedHistory, ReportedProgress, ReportOnce
from p2ptrain.recovery.cores.reconfigure_core import ChangeCore
from p2ptrain.recovery.generation_request import GenerationRequest, ReconfigureReason
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.state_report import StageCopy, StateKind
from p2ptrain.recovery.version import Version
from tests.simulation.recovery.changing import Changing
from tests.simulation.recovery.node import PASSED_OVER_SECONDS, Node
from tests.simulation.recovery.truth import InvariantViolated
from tests.simulation.recovery.world import World

KEEP_EVERY = 4
ROUNDS_AHEAD = 2


class Holder(Node):
    """A device that also holds the data."""

    holder_core_type: type[HolderCore] = HolderCore
    change_type: type[ChangeCore] = ChangeCore
    keeping_type: type[snapshot_tracker.SnapshotTracker] = snapshot_tracker.SnapshotTracker

    def __init__(self, id_: str, world: World, steps: int) -> None:
        super().__init__(id_, world)
        self.steps = steps
        self.over = False
        self.abandoned = 0  # versions
        self.passed: list[str] = []  # coordinators that were passed over
        self.commits = 0  # replayed ones too

    def start(self) -> None:
        """A new process, which goes on where its journal ends."""
        super().start()
        self.change: Changing | None = None
        disk, world = self.world.disk, self.world
        self.once = ReportOnce(ReportedProgress(disk.reported))
        self.committing: CommitTracker | None = None
        self.generation: Placement | None = None
        self.ordered = 0
        self.draining = False
        self.keeping = self.keeping_type()
        first = world.truth.first
        for unit, state in enumerate(world.truth.of(first)):
            self.store(unit, unit + 1, first, StateKind.INITIAL, (state,))
        journal = disk.journal
        copy = FullSnapshot(first, self.id, StateKind.INITIAL, most_replayed=world.replay_limit)
        self.holder = self.holder_core_type(
            self.id, self, world.truth.units, disk.reported, journal=journal, copies=lambda: (copy,)
        )
        self._wakes = float("inf")
        self._do_all(self.holder.start(world.now))

    def tell(
        self,
        event: Callable[Concatenate[float, P], list[PortCall]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call a method of the holder's core, and do what follows."""
        self._do_all(event(self.world.now, *args, **kwargs))

    def _do_all(self, calls: list[PortCall]) -> None:
        for call in calls:
            call()
        wakes = self.holder.next_wakeup
        if wakes != float("inf") and wakes != self._wakes:
            self._wakes = wakes
            self.later(max(0.0, wakes - self.world.now), "tick", self._tick)

    def _tick(self) -> None:
        self._wakes = float("inf")
        self._do_all(self.holder.tick(self.world.now))

    # -- what the world tells ------------------------------------------------------------------

    def on_link_up(self, peer: str) -> None:
        """To a member."""
        self.tell(self.holder.link_back, self.id, peer)

    def on_appeared(self, peer: str) -> None:
        """A member."""
        self.tell(self.holder.member_appeared, peer)
        if self.holder.phase is HolderPhase.TRAINING and self.world.rng.random() < 0.5:
            self.tell(self.holder.change_wanted, ReconfigureReason.JOIN)

    def on_link_lost(self, peer: str) -> None:
        """To a member."""
        super().on_link_lost(peer)
        self.tell(self.holder.link_broke, self.id, peer)

    def on_died(self, peer: str, *, certain: bool) -> None:
        """A member."""
        super().on_died(peer, certain=certain)
        if self.change is not None:
            self.change.on_died(peer)
        self.tell(self.holder.member_died, peer, certain=certain)

    @property
    def coordinator(self) -> str | None:
        """Whom this device follows."""
        return None if self.follows is None else self.follows[0]

    def passed_over(self, device: str) -> None:
        """A coordinator gave no plan; the devices of the job hear so."""
        self.passed.append(device)
        self.world.distrust(self.id, device, PASSED_OVER_SECONDS)
        for peer, is_alive in self.alive.items():
            if is_alive and peer != device:
                self.world.send(self.id, peer, "passed.over", device=device)

    def receive(self, peer: str, kind: str, fields: dict[str, Any]) -> None:
        """What only a holder gets."""
        match kind:
            case "done":
                self._on_done(peer, **fields)
            case "kept":
                self._on_kept(peer, **fields)
            case "link":
                if (
                    self.generation is not None
                    and fields["generation"] == self.generation.generation
                ):
                    event = self.holder.link_back if fields["back"] else self.holder.link_broke
                    self.tell(event, peer, fields["peer"])
            case "leaving":
                self.tell(self.holder.change_wanted, ReconfigureReason.LEAVE, peer)
            case _:
                super().receive(peer, kind, fields)

    # -- what the core says ----------------------------------------------------------------------

    def stop_rounds(self) -> None:
        """See `HolderPort`, as of all that follow."""
        self.generation = self.committing = None
        self.keeping.end()
        self.draining = False

    def drain_rounds(self) -> None:
        """Perhaps there is none under way."""
        self.draining = True
        self._check_drained()

    def write_down(self, noted: NotedHistory) -> None:
        """At once, or the process dies before or after."""
        self.world.failpoint(self)
        self.world.disk.journal = noted
        self.world.failpoint(self)

    def prepare(self, ask: GenerationRequest) -> None:
        """In place of what was asked for before."""
        self.change = Changing(self, ask)
        self.later(0.0, "change", self.change.start)

    def retain_only(self, versions: tuple[Version, ...], alive: frozenset[str]) -> None:
        """Over the network."""
        self._tell_all(sorted(alive), "keep", versions=versions)

    def report_failure(self, device: str) -> None:
        """Nobody looks."""

    def report_waiting(self, devices: tuple[str, ...]) -> None:
        """Nobody looks."""

    def grant_leave(self, device: str) -> None:
        """Over the network."""
        self.world.send(self.id, device, "let.go")

    def deny_leave(self, device: str, reason: str) -> None:
        """Over the network."""
        self.world.send(self.id, device, "stay")

    def end_part(self, first: int, end: int, devices: tuple[str, ...]) -> None:
        """By chance, here."""
        self._is_over("a part ends devices")

    def _tell_all(self, devices: list[str], kind: str, **fields: Any) -> None:
        for device in devices:
            if kind == "begin":
                self.world.failpoint(self)
            if not self.world.send(self.id, device, kind, **fields) and kind != "keep":
                self._no_link(device)

    def _no_link(self, device: str) -> None:
        self.later(0.001, "no link", lambda: self.tell(self.holder.link_broke, self.id, device))

    def begin(self, placed: Placement, reason: ReconfigureReason, alive: frozenset[str]) -> None:
        """Those without a part hear it too."""
        self.world.truth.began(placed)
        self.generation = placed
        seats = [(p, device) for p, stage in enumerate(placed.stages) for device in stage.devices]
        self.committing = CommitTracker(seats, placed.version.step)
        self.ordered = placed.version.step
        self.draining = False
        self.keeping.begin(placed)
        self._tell_all(sorted(alive), "begin", generation=placed.generation)
        if placed.version.step == self.steps and not self.holder.finishing:
            self.tell(self.holder.steps_done)
        self._order()

    def _order(self) -> None:
        generation, committing = self.generation, self.committing
        if generation is None or committing is None or self.draining:
            return
        while self.ordered < min(committing.over + ROUNDS_AHEAD, self.steps):
            step = self.ordered
            committing.order(step)
            keep = self.keeping.protects and (step + 1) % KEEP_EVERY == 0
            keep = keep and not self.keeping.under_way
            if keep:
                self.keeping.ordered(Version(step + 1, generation.generation))
            self.ordered += 1
            order = {"generation": generation.generation, "step": step, "keep": keep}
            stable = () if self.holder.history.stable is None else (self.holder.history.stable,)
            stay = (*stable, *self.keeping.under_way)
            self._tell_all(list(generation.devices), "order", **order, stay=stay)

    def _on_done(self, peer: str, generation: int, stage: int, step: int) -> None:
        placed, committing = self.generation, self.committing
        if placed is None or committing is None or placed.generation != generation:
            return
        try:
            decided = committing.done((stage, peer), step)
        except ProtocolError as error:
            raise InvariantViolated(f"{peer}: {error}") from error
        if decided:
            self._decide(placed, step)

    def _decide(self, placed: Placement, step: int) -> None:
        self.commits += 1
        self._report(step + 1)
        self._commit(placed, step)
        self.tell(self.holder.step_committed, step + 1)
        if step + 1 == self.steps and self.generation is placed:
            self.tell(self.holder.steps_done)
        self._check_drained()
        self._order()

    def _report(self, step: int) -> None:
        """First the journal, then people; nothing may come between."""
        if self.once.step(step):
            self.world.disk.reported = step
            self.world.reported.append(step)

    def _commit(self, placed: Placement, step: int) -> None:
        for device in reversed(placed.devices):
            self.world.failpoint(self)
            self._tell_all([device], "commit", generation=placed.generation, step=step)

    def _check_drained(self) -> None:
        committing = self.committing
        if self.draining and committing is not None and committing.over == self.ordered:
            self.later(0.0, "drained", self._drained)

    def _drained(self) -> None:
        if self.draining:
            self.tell(self.holder.rounds_drained)

    def _on_kept(self, peer: str, copy: StageCopy, failed: str | None) -> None:
        for result in self.keeping.acknowledged(peer, copy, failed):
            match result:
                case snapshot_tracker.SnapshotComplete(version):
                    self.tell(self.holder.snapshot_stable, version)
                case snapshot_tracker.TryBackupPeer(owner, backup_peer, again):
                    self.world.send(self.id, owner, "keeper", copy=again, backup_peer=backup_peer)
                case snapshot_tracker.SnapshotAbandoned():
                    self.abandoned += 1

    # -- the end -----------------------------------------------------------------------------------

    def collect_weights(self, placed: Placement) -> None:
        """Of every stage, from one of its devices."""
        final = Version(self.steps, placed.generation)
        if placed.version.step == self.steps:
            final = placed.version
        missing = set(placed.stages)

        def got(stage: Any, states: tuple[int, ...] | None) -> None:
            if self.generation is not placed:
                return
            if states is None:
                self.later(0.05, "read again", lambda: read(stage))
                return
            if states != self.world.truth.of(final)[stage.first : stage.end]:
                raise InvariantViolated("the weights that came home are not the trained ones")
            missing.discard(stage)
            if not missing:
                self.tell(self.holder.weights_home)

        def read(stage: Any) -> None:
            if self.generation is placed:
                units = range(stage.first, stage.end)
                self._read(stage.devices[0], units, final, lambda states: got(stage, states))

        for stage in placed.stages:
            read(stage)

    def stop_job(self, reason: str | None = None, lost: StateLost | None = None) -> None:
        """Done, or something is really lost."""
        if reason is not None and (lost is None or not self._is_really_lost(lost)):
            raise InvariantViolated(f"the job ended, but nothing was lost: {reason} {lost}")
        self._is_over(reason or "done")

    def _is_over(self, why: str) -> None:
        self.over = True
        self.world.ended = why
        alive = [self.id, *(peer for peer, alive in self.alive.items() if alive)]
        self._tell_all(alive, "end")

    def _is_really_lost(self, lost: StateLost) -> bool:
        """Whether no version of the history is whole on processes that live, reached or not."""
        nodes = [n for n in self.world.nodes.values() if isinstance(n, Node) and n.runs]
        versions = {entry.version for node in nodes for entry in node.copies}
        versions |= {seat.version for node in nodes for seat in node.seats.values()}
        return not any(
            all(
                any(node.state(unit, version) is not None for node in nodes)
                for unit in range(self.world.truth.units)
            )
            for version in versions
            if version.step > 0 and self.holder.history.lineage.is_valid(version)
        )
