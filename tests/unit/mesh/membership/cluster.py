"""Several members, joined by fake links without delay."""

from __future__ import annotations

from random import Random

from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import (
    ElectionInstruction,
    Instruction,
    MemberRecord,
    MembershipEvent,
    MemberUpdated,
    PeerLinkLost,
    PeerLinkUp,
)
from p2ptrain.mesh.membership.membership import Membership
from p2ptrain.mesh.membership.membership_config import HOME_LAN, MembershipConfig
from tests.unit.mesh.cores import Cores


class Cluster(Cores[Membership]):
    """Members "a", "b", ... all linked from the start.

    Attributes:
        changes: (observer, change), in order.
    """

    def __init__(self, ids: str, config: MembershipConfig = HOME_LAN) -> None:
        super().__init__(100.0)
        self.config = config
        self.changes: list[tuple[str, MemberUpdated]] = []
        self._started = 0
        for id_ in ids:
            self.add(id_)

    def add(self, id_: str, **fields: object) -> Membership:
        """Start a process of `id_` and link it to all the others."""
        self._started += 1
        record = MemberRecord(id_, f"device {id_}", **fields)  # type: ignore[arg-type]
        member = Membership(record, self.config, Random(f"{id_} {self._started}"))
        self.nodes[id_] = member
        self.carry_out(id_, member.tick(self.now))
        for peer in [p for p in self.nodes if p != id_]:
            self.feed(peer, PeerLinkUp(id_), settle=False)
            self.feed(id_, PeerLinkUp(peer), settle=False)
        self.settle()
        return member

    def feed(self, id_: str, event: MembershipEvent, *, settle: bool = True) -> list[Instruction]:
        """Give one event to one member, then deliver what follows from it."""
        out = self.nodes[id_].handle(event, self.now)
        self.carry_out(id_, out)
        if settle:
            self.settle()
        return out

    def lose_links(self, id_: str, *, refused: bool) -> None:
        """All the others lose their link to `id_`."""
        for peer in self.nodes:
            if peer != id_:
                self.feed(peer, PeerLinkLost(id_, refused), settle=False)
        self.settle()

    def state(self, observer: str, member: str) -> MemberState | None:
        """What `observer` believes of `member`; None where it knows nothing."""
        record = self.nodes[observer].members.get(member)
        return None if record is None else record.state

    def history(self, observer: str, member: str) -> list[str]:
        """States that `observer` reported of `member`."""
        return [
            change.record.state.value
            for by, change in self.changes
            if by == observer and change.record.id == member
        ]

    def note(self, id_: str, instruction: Instruction | ElectionInstruction) -> None:
        if isinstance(instruction, MemberUpdated):
            self.changes.append((id_, instruction))
