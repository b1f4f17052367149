"""Membership cores joined by fake links without delay, stepped by hand: for tests of one rule."""

from __future__ import annotations

from collections import deque
from random import Random

import cbor2

from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import (
    Instruction,
    MemberRecord,
    MembershipEvent,
    MemberUpdated,
    MessageReceived,
    Misbehaved,
    PeerLinkLost,
    PeerLinkUp,
    SendTo,
)
from p2ptrain.mesh.membership.membership import Membership
from p2ptrain.mesh.membership.membership_config import HOME_LAN, MembershipConfig

ROUNDS_LIMIT = 10_000


class Cluster:
    """Members "a", "b", ... all linked from the start.

    Attributes:
        members: by id.
        changes: (observer, change), in order.
        offences: (observer, what it did not believe), in order.
        silent: ids that get no ticks, and whose messages, to and fro, are lost.
        now: the clock that all share.
    """

    def __init__(self, ids: str, config: MembershipConfig = HOME_LAN) -> None:
        self.now = 100.0
        self.config = config
        self.members: dict[str, Membership] = {}
        self.changes: list[tuple[str, MemberUpdated]] = []
        self.offences: list[tuple[str, Misbehaved]] = []
        self.silent: set[str] = set()
        self.largest_message_bytes = 0
        self._wire: deque[tuple[str, str, bytes]] = deque()
        self._started = 0
        for id_ in ids:
            self.add(id_)

    def add(self, id_: str, **fields: object) -> Membership:
        """Start a process of `id_` and link it to all the others."""
        self._started += 1
        record = MemberRecord(id_, f"device {id_}", **fields)  # type: ignore[arg-type]
        member = Membership(record, self.config, Random(f"{id_} {self._started}"))
        self.members[id_] = member
        self._carry_out(id_, member.tick(self.now))
        for peer in [p for p in self.members if p != id_]:
            self.feed(peer, PeerLinkUp(id_), settle=False)
            self.feed(id_, PeerLinkUp(peer), settle=False)
        self.settle()
        return member

    def feed(self, id_: str, event: MembershipEvent, *, settle: bool = True) -> list[Instruction]:
        """Give one event to one member, then deliver what follows from it."""
        out = self.members[id_].handle(event, self.now)
        self._carry_out(id_, out)
        if settle:
            self.settle()
        return out

    def lose_links(self, id_: str, *, refused: bool) -> None:
        """All the others lose their link to `id_`."""
        for peer in self.members:
            if peer != id_:
                self.feed(peer, PeerLinkLost(id_, refused), settle=False)
        self.settle()

    def settle(self) -> None:
        """Deliver until nothing is on the wire."""
        for _ in range(ROUNDS_LIMIT):
            if not self._wire:
                return
            sender, receiver, data = self._wire.popleft()
            if receiver in self.members and not {sender, receiver} & self.silent:
                event = MessageReceived(sender, cbor2.loads(data))
                self._carry_out(receiver, self.members[receiver].handle(event, self.now))
        raise AssertionError("the members never fall silent")

    def run_for(self, seconds: float) -> None:
        """Tick everybody when due."""
        end = self.now + seconds
        while self.now < end:
            awake = [m for i, m in self.members.items() if i not in self.silent]
            self.now = min([end, *(max(self.now, m.next_wakeup) for m in awake)])
            for id_, member in self.members.items():
                if id_ not in self.silent and member.next_wakeup <= self.now:
                    self._carry_out(id_, member.tick(self.now))
            self.settle()

    def state(self, observer: str, member: str) -> MemberState | None:
        """What `observer` believes of `member`; None where it knows nothing."""
        record = self.members[observer].members.get(member)
        return None if record is None else record.state

    def history(self, observer: str, member: str) -> list[str]:
        """States that `observer` reported of `member`."""
        return [
            change.record.state.value
            for by, change in self.changes
            if by == observer and change.record.id == member
        ]

    def _carry_out(self, id_: str, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SendTo):
                data = cbor2.dumps(instruction.payload)
                self.largest_message_bytes = max(self.largest_message_bytes, len(data))
                self._wire.append((id_, instruction.peer, data))
            elif isinstance(instruction, MemberUpdated):
                self.changes.append((id_, instruction))
            else:
                self.offences.append((id_, instruction))
