"""One seed: faults for a while, then none; what must hold meanwhile, and what must follow.

gentle   one device at a time is killed or cut off, with time to recover: nothing may ever be lost
rough    everything at once, the holder too, short memory, plans that do not fit, rounds that break
         off for nothing: never silently wrong, and training continues afterwards

In some of both one device, where it coordinates, gives no plan, or something that is none.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.cores.holder_core import HolderCore
from p2ptrain.recovery.cores.reconfigure_core import ChangeCore
from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.state_report import StateKind
from tests.simulation.recovery.holder import Holder
from tests.simulation.recovery.node import Node, Plans
from tests.simulation.recovery.truth import InvariantViolated
from tests.simulation.recovery.world import Killed, Process, World

PROGRESS_SECONDS = 30.0
UNITS = 6


class NoProgress(InvariantViolated):
    """Faults are over, but training does not go on."""


@dataclass(frozen=True, slots=True)
class Build:
    """What runs everywhere: the shells and cores, a mutant's where a bug is planted."""

    node: type[Node] = Node
    holder: type[Holder] = Holder
    device_core: type[WorkerCore] = WorkerCore
    change_core: type[ChangeCore] = ChangeCore
    holder_core: type[HolderCore] = HolderCore


@dataclass(frozen=True, slots=True)
class Result:
    """What happened.

    Attributes:
        steps: reported.
        generations: the last generation's number.
        events: executed.
        event_hash: of all of them.
        ended: why the job ended, None where it goes on.
        resumed_seconds: from the end of the faults to the next commit, new or replayed.
    """

    seed: int
    steps: int
    epochs: int
    events: int
    faults: int
    event_hash: str
    ended: str | None
    resumed_seconds: float


_BUILD = Build()


class Household:
    """A holder and some devices, watched."""

    def __init__(self, seed: int, build: Build) -> None:
        self.rng = Random(f"recovery {seed}")
        self.more = Random(f"recovery {seed}, what nothing explains")
        self.world = World(self.rng.getrandbits(64), UNITS)
        self.gentle = self.rng.random() < 0.5
        self.faults: list[str] = []
        self.stopped = False
        self.pace = self.rng.choice((1.0, 2.5, 6.0))
        self._seen_reported = 0
        self.seen_generation = 0
        self._seen_decided = -1
        if self.gentle:
            self.world.groups = False
        steps = self.rng.choice((60, 10**6, 10**6))
        self.holder = build.holder("h", self.world, steps)
        self.devices = [
            build.node(f"{name}", self.world) for name in "abcde"[: self.rng.randint(1, 5)]
        ]
        for node in (self.holder, *self.devices):
            node.core_type = build.device_core
        self.holder.change_type = build.change_core
        self.holder.holder_core_type = build.holder_core
        self.nodes: list[Node] = [self.holder, *self.devices]
        who_plans = Random(f"recovery {seed}, who plans badly")
        if who_plans.random() < 0.4:
            who_plans.choice(self.devices).plans = who_plans.choice(list(Plans))
        self.world.check = self.check
        self.world.kill = self._kill_inside
        if not self.gentle:
            self.world.kill_rate = self.rng.choice((0.0, 0.001, 0.01))
            self.world.late_share = self.rng.choice((0.0, 0.0, 0.01))
            self.world.short_share = self.more.choice((0.0, 0.0, 0.05))
            self.world.no_plan_share = self.more.choice((0.0, 0.5))

    # -- invariants --------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every event."""
        world = self.world
        for number in world.reported[self._seen_reported :]:
            if number != self._seen_reported + 1:
                raise InvariantViolated(f"step {number} reported after {self._seen_reported}")
            self._seen_reported += 1
        journal = world.disk.journal
        generation = journal.placed.generation if journal is not None and journal.placed else 0
        if generation < self.seen_generation:
            raise InvariantViolated(f"generation {generation} after {self.seen_generation}")
        self.seen_generation = generation
        decided = self.holder.committing.over if self.holder.committing is not None else -1
        if decided != self._seen_decided:
            self._seen_decided = decided
            self.holder.changed = True
            for node in self.devices:
                node.changed = True
        for node in self.nodes:
            if node.changed and node.runs:
                self._check_node(node)
                node.changed = False

    @property
    def copied(self) -> bool:
        """Whether the plan in force has every unit on two devices."""
        placed = self.holder.holder.history.placed
        return placed is not None and all(
            stage.copies_to is not None or len(stage.devices) > 1 for stage in placed.stages
        )

    def _check_node(self, node: Node) -> None:
        truth, holder = self.world.truth, self.holder
        if (
            holder.runs
            and holder.generation is not None
            and node.engaged == holder.generation.generation
        ):
            trains = {(seat.first, seat.end) for seat in node.seats.values()}
            if trains != set(holder.generation.ranges_of(node.id)):
                raise InvariantViolated(f"{node.id} trains {trains}, not what the plan gives it")
        for seat in node.seats.values():
            has = (seat.version, seat.states)
            if seat.checked is None or seat.checked != has:
                if seat.states != truth.of(seat.version)[seat.first : seat.end]:
                    raise InvariantViolated(
                        f"{node.id}: units from {seat.first} are not {seat.version}"
                    )
                seat.checked = has
            if seat.version.step > self.world.disk.reported:
                raise InvariantViolated(f"{node.id} applied {seat.version} before it counted")
            running = holder.generation if holder.runs else None
            if running is not None and node.engaged == running.generation and holder.committing:
                behind = holder.committing.over - seat.version.step
                if behind not in (0, 1):
                    raise InvariantViolated(f"{node.id} is {behind} versions behind")
        copies = list(node.copies.items())
        if copies == node.checked:
            return
        for entry, states in copies:
            if states != truth.of(entry.version)[entry.first : entry.end]:
                raise InvariantViolated(f"{node.id}: {entry} is something else")
        kept = {c.version for c in node.copies if c.kind in (StateKind.KEPT, StateKind.REPLICA)}
        if len(kept) > 4:
            raise InvariantViolated(f"{node.id} keeps {len(kept)} versions")
        node.checked = copies

    # -- faults ------------------------------------------------------------------------------

    def inject(self) -> None:
        """One fault, and the next after a while."""
        if self.stopped:
            return
        if not self.world.ended:
            what = self._gentle_fault() if self.gentle else self._rough_fault()
            self.faults.append(f"{self.world.now:.2f} {what}")
        seconds = 12.0 if self.gentle else self.pace * self.rng.expovariate(1.0)
        self.world.after(seconds, "fault", self.inject)

    @property
    def mean(self) -> float:
        """Seconds between rough faults."""
        return 2.5

    def haunt(self) -> None:
        """Old commands come again, in some households."""
        if not self.stopped:
            self.world.repeat_command()
            self.world.after(self.rng.uniform(0.2, 2.0), "haunt", self.haunt)

    def fret(self) -> None:
        """The holder sees signs that nothing explains, in some households."""
        holder = self.holder
        if self.stopped:
            return
        if holder.runs and not holder.frozen and not self.world.ended:
            device = self.more.choice(self.devices).id
            core = holder.holder
            signs: tuple[tuple[Any, ...], ...] = (
                (core.round_interrupted, "a round"),
                (core.round_stalled, frozenset({device})),
                (core.out_of_memory, device, MemoryBudgets(1)),
            )
            event, *args = self.more.choice(signs)
            self.faults.append(f"{self.world.now:.2f} {event.__name__} {args}")
            holder.tell(event, *args)
        self.world.after(self.more.uniform(5.0, 20.0), "fret", self.fret)

    def _gentle_fault(self) -> str:
        kinds = ("kill", "kill inside", "kill inside", "cut", "freeze", "leave", "kill holder")
        kind = self.rng.choice(kinds)
        if kind == "kill inside":
            self.world.kill_rate = 0.05  # until it kills somebody
            return kind
        node = self.rng.choice(self.devices)
        if kind == "kill holder":
            node = self.holder
        if not node.runs or node.frozen:
            self._restart(node)
            return f"start {node.id}"
        if kind == "cut":
            return self._cut()
        if kind == "freeze":
            return self._freeze(node, self.rng.uniform(0.2, 3.0))
        if kind == "leave":
            return self._leave(node)
        return self._kill(node, self.rng.uniform(0.05, 3.0))

    def _rough_fault(self) -> str:
        node = self.rng.choice(self.nodes)
        if not node.runs or node.frozen:
            return "nothing"
        match self.rng.randrange(8):
            case 0:
                return self._kill(node, self.rng.choice((0.05, 1.0, 6.0)))
            case 1:
                return self._freeze(node, self.rng.choice((0.5, 3.0, 9.0)))
            case 2 | 3:
                return self._split()
            case 4 if node is not self.holder:
                return self._leave(node)
            case 5:
                leader = next((n for n in self.nodes if n.follows and n.follows[0] == n.id), node)
                return self._freeze(leader, 7.0) if leader.runs else "nothing"
            case 6:
                return self._power_off(node, self.rng.choice((1.0, 6.0, 20.0)))
            case 7:
                return self._slow_links()
            case _:
                return self._cut()

    def _kill(self, node: Node, seconds: float) -> str:
        node.kill()
        return f"kill {node.id}, {self._restart_later(node, seconds)}"

    def _power_off(self, node: Node, seconds: float) -> str:
        node.power_off()
        return f"power off {node.id}, {self._restart_later(node, seconds)}"

    def _restart_later(self, node: Node, seconds: float) -> str:
        # the holder's disk has the job too
        keeps_disk = node is self.holder or self.rng.random() < 0.7
        instance = node.instance

        def restart() -> None:
            if node.instance == instance:
                if not keeps_disk:
                    self.world.lose_disk(node.id)
                self._restart(node)

        self.world.after(seconds, "restart", restart)
        return f"back in {seconds:.2f} s {'with' if keeps_disk else 'without'} its disk"

    def _kill_inside(self, node: Process) -> None:
        assert isinstance(node, Node)
        if self.gentle:
            self.world.kill_rate = 0.0
        self._kill(node, self.rng.choice((0.05, 1.0, 5.0)))

    def _restart(self, node: Node) -> None:
        if not node.runs and not self.world.ended:
            node.start()

    def _freeze(self, node: Node, seconds: float) -> str:
        node.frozen = True
        self.world.froze(node.id)
        instance = node.instance

        def thaw() -> None:
            if node.instance == instance:
                self._thaw(node)

        self.world.after(seconds, "thaw", thaw)
        return f"freeze {node.id} for {seconds:.2f} s"

    def _thaw(self, node: Node) -> None:
        if node.frozen:
            node.frozen = False
            self.world.thawed(node.id)

    def _cut(self) -> str:
        one, other = self.rng.sample([node.id for node in self.nodes], 2)
        self.world.cut(one, other)
        return f"cut {one} {other}"

    def _split(self) -> str:
        ids = [node.id for node in self.nodes]
        part = self.rng.sample(ids, self.rng.randint(1, len(ids) - 1))
        rest = [id_ for id_ in ids if id_ not in part]
        paths = [(a, b) for a in part for b in rest if self.rng.random() < 0.9]
        one_way = self.rng.random() < 0.3
        if not one_way:
            paths += [(b, a) for a, b in paths]
        seconds = self.rng.choice((1.0, 6.0, 15.0))
        self.world.block(paths)
        self.world.after(seconds, "heal", lambda: self.world.unblock(paths))
        return f"split {part} {'to' if one_way else 'from'} {rest} for {seconds} s"

    def _slow_links(self) -> str:
        ids = [node.id for node in self.nodes]
        paths = [(a, b) for a in ids for b in ids if a != b and self.rng.random() < 0.5]
        mean = self.rng.choice((0.03, 0.1, 0.3))
        self.world.slow_links(paths, mean)
        self.world.after(self.rng.choice((3.0, 15.0)), "mend", self.world.mend_links)
        return f"slow links, {mean} s on {len(paths)} paths"

    def _leave(self, node: Node) -> str:
        if self.world.linked(node.id, "h"):
            self.world.send(node.id, "h", "leaving")
        return f"{node.id} wants to leave"

    def end_faults(self) -> None:
        """Nothing breaks any more; everybody is back."""
        self.stopped = True
        self.world.kill_rate = 0.0
        self.world.mend_links()
        for node in self.nodes:
            self._thaw(node)
            self._restart(node)


def run_seed(seed: int, build: Build = _BUILD, *, fault_seconds: float = 60.0) -> Result:
    """Play it.

    Raises:
        InvariantViolated: the message names the seed and the last faults.
    """
    household = Household(seed, build)
    world = household.world
    world.replay_limit = 60 if household.gentle else household.rng.choice((None, 100))
    try:
        return _play(household, seed, fault_seconds)
    except InvariantViolated as violation:
        last = "; ".join(household.faults[-4:] + world.killed_inside[-3:])
        mode = "gentle" if household.gentle else "rough"
        text = f"seed {seed} ({mode}) at {world.now:.3f} s: {violation} (last faults: {last})"
        raise type(violation)(text) from violation


def _play(household: Household, seed: int, fault_seconds: float) -> Result:
    world = household.world
    for node in household.nodes:
        with suppress(Killed):
            node.start()
    world.after(3.0 if household.gentle else 1.0, "fault", household.inject)
    if household.rng.random() < 0.5:
        household.haunt()
    if not household.gentle and household.more.random() < 0.5:
        world.after(5.0, "fret", household.fret)
    world.kernel.run_until(fault_seconds)
    household.end_faults()
    world.kernel.run_until(fault_seconds + 18.0)  # whatever lasts longer has ended by then
    household.end_faults()
    before, since = len(world.reported), world.now
    commits, moved, resumed = household.holder.commits, since, PROGRESS_SECONDS
    while len(world.reported) == before and world.ended is None:
        world.kernel.run_until(world.now + 0.25)
        if household.holder.commits != commits:  # replayed ones too: there may be many
            commits, moved = household.holder.commits, world.now
            resumed = min(resumed, moved - since)
        if world.now - moved > PROGRESS_SECONDS:
            raise NoProgress(f"no step after {before} for {PROGRESS_SECONDS} s")
    if household.gentle and world.ended not in (None, "done") and household.copied:
        raise InvariantViolated(f"one failure at a time, and the job ended: {world.ended}")
    return Result(
        seed,
        len(world.reported),
        household.seen_generation,
        world.kernel.executed,
        len(household.faults) + len(world.killed_inside),
        world.kernel.event_hash,
        world.ended,
        min(resumed, world.now - since),
    )
