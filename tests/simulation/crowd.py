"""Hundreds of members: membership alone, as many cores as there are members, all in one process.

Everybody knows everybody from the start, over links that all work; what is asked is how the rules
scale: what each member sends, and how soon all know of a death.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import (
    Instruction,
    MemberRecord,
    MessageReceived,
    Payload,
    SendTo,
)
from p2ptrain.mesh.membership.membership import Membership
from p2ptrain.mesh.membership.membership_config import MembershipConfig
from tests.simulation.kernel import Kernel

EVENTS_PER_MEMBER_LIMIT = 100
"""A second; see `Kernel`."""
_LEAST_SECONDS, _MEAN_SECONDS = 0.0005, 0.002


class Crowd:
    """`count` members that have been together for long."""

    def __init__(self, seed: int, count: int) -> None:
        self.rng = Random(f"crowd {seed} {count}")
        self.kernel = Kernel(events_per_second_limit=EVENTS_PER_MEMBER_LIMIT * count)
        self.messages = 0
        config = MembershipConfig(table_limit=2 * count)
        ids = [f"{number:08x}" for number in self.rng.sample(range(1 << 32), count)]
        records = [MemberRecord(id_, f"device {id_}", instance=id_) for id_ in ids]
        self.members = {
            record.id: Membership(record, config, Random(self.rng.getrandbits(64)))
            for record in records
        }
        for member in self.members.values():
            for record in records:
                member._table.put(record, 0.0)  # by gossip it would take a million claims
        self.silent: set[str] = set()
        self._wake_at = dict.fromkeys(ids, float("inf"))
        for id_, member in self.members.items():
            self._carry_out(id_, member.tick(self.kernel.now))

    def run_for(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.kernel.run_until(self.kernel.now + seconds)

    def unaware(self, device: str) -> int:
        """How many of the others do not have `device` dead."""
        return sum(
            member.members[device].state is not MemberState.DEAD
            for id_, member in self.members.items()
            if id_ != device
        )

    def dead(self) -> set[str]:
        """Whom anybody has dead."""
        return {
            record.id
            for member in self.members.values()
            for record in member.members.values()
            if record.state is MemberState.DEAD
        }

    def _carry_out(self, id_: str, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SendTo):
                self._send(id_, instruction.peer, instruction.payload)
        wake_at = max(self.kernel.now, self.members[id_].next_wakeup)
        if wake_at < self._wake_at[id_]:
            self._wake_at[id_] = wake_at
            self.kernel.at(wake_at, b"tick " + id_.encode(), lambda: self._wake(id_, wake_at))

    def _wake(self, id_: str, wake_at: float) -> None:
        if self._wake_at[id_] != wake_at:
            return  # it was woken earlier, and says again when to come
        self._wake_at[id_] = float("inf")
        if id_ not in self.silent:
            self._carry_out(id_, self.members[id_].tick(self.kernel.now))

    def _send(self, sender: str, receiver: str, payload: Payload) -> None:
        self.messages += 1
        delay = _LEAST_SECONDS + self.rng.expovariate(1 / (_MEAN_SECONDS - _LEAST_SECONDS))
        label = f"{sender}>{receiver}".encode()
        self.kernel.after(delay, label, lambda: self._deliver(sender, receiver, payload))

    def _deliver(self, sender: str, receiver: str, payload: Payload) -> None:
        if receiver not in self.silent:
            event = MessageReceived(sender, payload)
            self._carry_out(receiver, self.members[receiver].handle(event, self.kernel.now))


@dataclass(frozen=True, slots=True)
class CrowdResult:
    """What one crowd showed.

    Attributes:
        quiet: messages a member and second while nothing happens.
        dying: the same from a death until all know of it.
        agreed_seconds: from the death, a silent one, until all know of it.
    """

    members: int
    quiet: float
    dying: float
    agreed_seconds: float


def measure_crowd(seed: int, count: int, quiet_seconds: float = 8.0) -> CrowdResult:
    """Nothing for a while, then one member falls silent.

    Raises:
        AssertionError: not all have it dead after 30 s, or they have somebody else dead.
    """
    crowd = Crowd(seed, count)
    crowd.run_for(2.0)
    before = crowd.messages
    crowd.run_for(quiet_seconds)
    quiet = (crowd.messages - before) / count / quiet_seconds
    victim = crowd.rng.choice(sorted(crowd.members))
    crowd.silent.add(victim)
    start, before = crowd.kernel.now, crowd.messages
    while crowd.unaware(victim):
        crowd.run_for(0.1)
        assert crowd.kernel.now - start < 30.0, f"seed {seed}: {crowd.unaware(victim)} unaware"
    seconds = crowd.kernel.now - start
    assert crowd.dead() == {victim}, f"seed {seed}: others are dead too"
    return CrowdResult(count, quiet, (crowd.messages - before) / count / seconds, seconds)
