"""A simulated device: the two mesh cores, a shell around them, a disk and a clock that drifts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from p2ptrain.mesh.conduct import Conduct, Judgement, Offence
from p2ptrain.mesh.election.election import Election
from p2ptrain.mesh.election.terms import ElectionConfig
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import (
    CoordinatorIs,
    CoordinatorLost,
    ElectionEvent,
    ElectionInstruction,
    Instruction,
    Leave,
    LinkTraffic,
    MemberRecord,
    MembersChanged,
    MembershipEvent,
    MemberUpdated,
    MessageReceived,
    Misbehaved,
    Payload,
    PeerLinkLost,
    PeerLinkUp,
    SelfChanged,
    SendTo,
)
from p2ptrain.mesh.membership.membership import Membership
from p2ptrain.mesh.membership.membership_config import HOME_LAN, MembershipConfig
from tests.simulation.kernel import Kernel
from tests.simulation.network import Network

REDIAL_SECONDS = 0.5
_ELECTION = ElectionConfig()
_LIVE = (MemberState.ALIVE, MemberState.SUSPECT)


@dataclass(frozen=True, slots=True)
class Build:
    """What runs on every device: the cores (a mutant's, where one is planted) and their knobs."""

    membership: type[Membership] = Membership
    election: type[Election] = Election
    membership_config: MembershipConfig = HOME_LAN
    election_config: ElectionConfig = _ELECTION
    close_links_to_the_dead: bool = True


@dataclass(slots=True)
class Disk:
    """What survives a restart; `generation` counts how often it was lost."""

    incarnation: int = 0
    term_floor: int = 0
    generation: int = 0


class Device:
    """One device. `watch` is called after each call of a core, with what came out.

    Attributes:
        run: number of the present process, from 1.
        membership, election: of the present process.
    """

    def __init__(self, id_: str, build: Build, network: Network, kernel: Kernel, rng: Random):
        self.id = id_
        self.build = build
        self.disk = Disk()
        self.run = 0
        self.process_runs = self.machine_runs = self.is_frozen = False
        self.has_left = False
        self.clock_rate = rng.uniform(0.9, 1.1)
        self.on_judgement: Callable[[Device, str, Judgement], None] = lambda *_: None
        self.watch: Callable[[Device, list[Instruction | ElectionInstruction]], None] = (
            lambda device, out: None
        )
        self._clock_offset = rng.uniform(0, 1000)
        self._network = network
        self._kernel = kernel
        self._rng = rng
        self._inbox: list[Callable[[], None]] = []
        self._wake_at = float("inf")
        self._freezes = 0

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, on a machine that may have been off."""
        self.run += 1
        self.process_runs = True
        self.is_frozen = self.has_left = False
        self._inbox.clear()
        self.disk.incarnation += 1
        record = MemberRecord(self.id, f"device {self.id}", self.disk.incarnation)
        self.membership = self.build.membership(
            record, self.build.membership_config, Random(self._rng.getrandbits(64))
        )
        self.election = self.build.election(
            self.id,
            self.build.election_config,
            Random(self._rng.getrandbits(64)),
            self.disk.term_floor,
        )
        self._conduct = Conduct()
        if not self.machine_runs:
            self.machine_runs = True
            self._network.machine_started(self.id)
        self._wake_at = float("inf")
        self._tick()
        self._redial(self.run)

    def crash(self) -> None:
        """The process is killed; its kernel closes the links."""
        self._end()
        self._network.process_ended(self.id)

    def power_off(self) -> None:
        """Nobody is informed."""
        self._end()
        self.machine_runs = False
        self._network.machine_ended(self.id)

    def lose_disk(self) -> None:
        """The next process starts without memory."""
        self.disk = Disk(generation=self.disk.generation + 1)

    def leave(self) -> None:
        """Say goodbye, then end."""
        if not self.process_runs or self.is_frozen:
            return
        self._member(Leave())
        self.crash()
        self.has_left = True

    def freeze(self, seconds: float) -> None:
        """Neither ticks nor messages for a while, infinity until `thaw`, then all at once."""
        self._freezes += 1
        self.is_frozen = True
        number = self._freezes
        if seconds == float("inf"):
            return
        self._kernel.after(seconds, b"thaw " + self.id.encode(), lambda: self._thaw(number))

    def thaw(self) -> None:
        """Wake up now, where frozen."""
        self._thaw(self._freezes)

    def rename(self, name: str) -> None:
        """Describe itself again."""
        if self.process_runs and not self.is_frozen:
            self._member(SelfChanged(name=name))

    def distrust(self, device: str, seconds: float) -> None:
        """That one does not coordinate for so long, as this one sees it."""
        if self.process_runs and not self.is_frozen:
            out = self.election.exclude(device, self.now + seconds, self.now)
            self._carry_out_election(out)
            self._schedule()

    def _end(self) -> None:
        self.process_runs = self.is_frozen = False
        self._inbox.clear()

    def _thaw(self, number: int) -> None:
        if not self.is_frozen or number != self._freezes:
            return
        self.is_frozen = False
        inbox = list(self._inbox)
        self._inbox.clear()
        tick_first = self._rng.random() < 0.5  # which comes first is up to the event loop
        if tick_first:
            self._tick()
        for deliver in inbox:
            deliver()
        if not tick_first:
            self._tick()

    # -- what the network tells --------------------------------------------------------------

    def on_message(self, peer: str, channel: str, payload: Payload) -> None:
        """A message arrived."""
        received = MessageReceived(peer, payload)
        self._receive(lambda: self._note(Misbehaved(peer, Offence.FLOOD)))
        if channel == "member":
            self._receive(lambda: self._member(received))
        else:
            self._receive(lambda: self._elect(received))

    def on_traffic(self, peer: str) -> None:
        """Much data arrived: seen at the next look."""
        if not self.is_frozen and self.process_runs:
            self._member(LinkTraffic({peer: self.now}, {peer: self.now}))

    def on_sign(self, peer: str) -> None:
        """Something arrived that cannot be read yet: seen at the next look."""
        if not self.is_frozen and self.process_runs:
            self._member(LinkTraffic({}, {peer: self.now}))

    def on_link_up(self, peer: str) -> None:
        """A link is up, perhaps in place of one that was not known to be dead."""
        self._receive(lambda: self._member(PeerLinkUp(peer)))

    def on_link_lost(self, peer: str, *, refused: bool) -> None:
        """The link ended, or its redial was refused."""
        self._receive(lambda: self._member(PeerLinkLost(peer, refused)))

    def _receive(self, deliver: Callable[[], None]) -> None:
        if self.is_frozen:
            run = self.run
            self._inbox.append(lambda: deliver() if run == self.run else None)
        elif self.process_runs:
            deliver()

    # -- the shell -------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """This device's own monotonic clock."""
        return self._clock_offset + self._kernel.now * self.clock_rate

    def _tick(self) -> None:
        if not self.process_runs or self.is_frozen:
            return
        if self.membership.next_wakeup <= self.now:
            self._carry_out(self.membership.tick(self.now))
        if self.process_runs and self.election.next_wakeup <= self.now:
            self._carry_out_election(self.election.tick(self.now))
        self._schedule()

    def _member(self, event: MembershipEvent) -> None:
        if self.process_runs:
            self._carry_out(self.membership.handle(event, self.now))

    def _elect(self, event: ElectionEvent) -> None:
        if self.process_runs:
            self._carry_out_election(self.election.handle(event, self.now))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        changed = False
        for instruction in instructions:
            if isinstance(instruction, SendTo):
                self._network.send((self.id, instruction.peer), "member", instruction.payload)
            elif isinstance(instruction, Misbehaved):
                self._note(instruction)
            else:
                changed = True
        self.disk.incarnation = self.membership.members[self.id].incarnation
        self.watch(self, list(instructions))
        for instruction in instructions:
            if isinstance(instruction, MemberUpdated):
                self._on_changed(instruction)
        if changed:
            records = self.membership.members.values()
            alive = frozenset(record.id for record in records if record.state in _LIVE)
            self._elect(MembersChanged(alive))
        self._schedule()

    def _on_changed(self, change: MemberUpdated) -> None:
        closes = self.build.close_links_to_the_dead
        if closes and self.membership.members[change.record.id].state is MemberState.DEAD:
            self._network.close(self.id, change.record.id)

    def _carry_out_election(self, instructions: list[ElectionInstruction]) -> None:
        self.disk.term_floor = self.election.term
        for instruction in instructions:
            if isinstance(instruction, SendTo):
                self._network.send((self.id, instruction.peer), "election", instruction.payload)
            elif isinstance(instruction, Misbehaved):
                self._note(instruction)
            else:
                assert isinstance(instruction, CoordinatorIs | CoordinatorLost)
        self.watch(self, list(instructions))
        self._schedule()

    def _note(self, misbehaved: Misbehaved) -> None:
        peer, offence, about = misbehaved.peer, misbehaved.offence, misbehaved.about
        judgement = self._conduct.note(peer, offence, self.now, about)
        if judgement is not None:
            self.on_judgement(self, peer, judgement)

    def _schedule(self) -> None:
        local = min(self.membership.next_wakeup, self.election.next_wakeup)
        wake_at = max(self._kernel.now, (local - self._clock_offset) / self.clock_rate)
        if wake_at >= self._wake_at or wake_at == float("inf"):
            return
        self._wake_at = wake_at
        run = self.run
        late = self._rng.uniform(0, 0.004)  # what an event loop needs to get around to it
        label = b"tick " + self.id.encode()
        self._kernel.at(wake_at + late, label, lambda: self._on_wake(run, wake_at))

    def _on_wake(self, run: int, wake_at: float) -> None:
        if run == self.run and wake_at == self._wake_at:  # else it was woken sooner
            self._wake_at = float("inf")
            self._tick()

    def _redial(self, run: int) -> None:
        """Discovery and redial, as the shell does them: while this process lives."""
        if run != self.run or not self.process_runs:
            return
        if not self.is_frozen:
            self._network.redial(self.id)
        seconds = REDIAL_SECONDS * self._rng.uniform(0.8, 1.2)
        self._kernel.after(seconds, b"redial " + self.id.encode(), lambda: self._redial(run))
