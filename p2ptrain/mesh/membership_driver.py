"""The shell of membership and election: hands them messages, links and the time.

Every event goes to its core together with the time, and the core's instructions are carried out at
once and in order. No decision is made here.

Where a link is full, a probe or its answer may wait behind data for longer than a probe has time.
So the driver also reports which peers have sent data since the last look: data shows that its
sender is there. A few bytes do not count, since the kernel of a device that receives nothing still
sends what fits into its window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic

from p2ptrain.errors import ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.election.election import Election
from p2ptrain.mesh.guard import Guard
from p2ptrain.mesh.interface import (
    CoordinatorChanged,
    MemberChanged,
    MemberState,
    MeshCoordinator,
    MeshEvent,
    MeshMember,
)
from p2ptrain.mesh.links.connections import Connections
from p2ptrain.mesh.membership.core_events import (
    CoordinatorIs,
    CoordinatorLost,
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
    SendTo,
)
from p2ptrain.mesh.membership.membership import Membership
from p2ptrain.net.link.stream import StreamArrival
from p2ptrain.net.message import Message

log = get_logger(__name__)

MEMBERSHIP_KIND = "swim.message"

ELECTION_KIND = "election.message"

TIMER_SECONDS = 0.001
"""Timers of some event loops count whole milliseconds; one that came too soon would come again."""

_PAYLOAD = "payload"

_LIVE = (MemberState.ALIVE, MemberState.SUSPECT)


class MembershipDriver:
    """Who is here and who coordinates, as this device sees it.

    Attributes:
        membership, election: the two cores.
        coordinator: whom this device follows.

    Args:
        notify: hands an event to those who watch.
        keep_term: stores an election term durably.
    """

    def __init__(
        self,
        self_id: str,
        membership: Membership,
        election: Election,
        connections: Connections,
        guard: Guard,
        notify: Callable[[MeshEvent], None],
        keep_term: Callable[[int], None],
    ) -> None:
        self._self_id = self_id
        self._connections = connections
        self._guard = guard
        self._tell = notify
        self._keep_term = keep_term
        self._loop = asyncio.get_running_loop()
        self.membership = membership
        self.election = election
        self._traffic = TrafficWatch()
        self.coordinator: MeshCoordinator | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # what it waits for
        self._stopped = False

    @property
    def members(self) -> dict[str, MeshMember]:
        """By id, this device included."""
        return {key: _member(record) for key, record in self.membership.members.items()}

    def start(self) -> None:
        """Begin to probe and to elect."""
        self._tick()

    def stop(self) -> None:
        """Do nothing any more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def handle(self, event: MembershipEvent) -> None:
        """Something happened to this device, its links or its household."""
        if not self._stopped:
            self._run(MEMBERSHIP_KIND, self.membership.handle(event, monotonic()))
            self._schedule()

    def distrust(self, device_id: str, seconds: float) -> None:
        """That device does not coordinate for so long, as this one sees it."""
        now = monotonic()
        self._run_election(self.election.exclude(device_id, now + seconds, now))
        self._schedule()

    def leave(self) -> None:
        """Tell the others that this device leaves, then stop."""
        self.handle(Leave())
        self.stop()

    def take(self, peer_id: str, message: Message) -> None:
        """Handler of both kinds: a peer that sends what its protocol forbids loses its link."""
        self._guard.note(peer_id, Offence.FLOOD)
        received = MessageReceived(peer_id, message.fields.get(_PAYLOAD, {}))
        try:
            if message.kind == MEMBERSHIP_KIND:
                self.handle(received)
            elif not self._stopped:
                self._run_election(self.election.handle(received, monotonic()))
                self._schedule()
        except ProtocolError as error:
            log.warning("peer_flagged", peer=peer_id[:16], kind=message.kind, why=str(error))
            self._guard.note(peer_id, Offence.MALFORMED, why=str(error))
            self._connections.cut(peer_id, str(error))

    def _tick(self) -> None:
        self._timer = None
        if self._stopped:
            return
        now = monotonic()
        try:
            if self.membership.next_wakeup <= now:
                traffic = self._traffic.look(self._connections.arrivals(), now)
                if traffic is not None:
                    self._run(MEMBERSHIP_KIND, self.membership.handle(traffic, now))
                self._run(MEMBERSHIP_KIND, self.membership.tick(now))
            if self.election.next_wakeup <= now:
                self._run_election(self.election.tick(now))
        finally:
            self._schedule()  # an error is reported by the event loop; the clock continues

    def _schedule(self) -> None:
        """See to it that `_tick` comes in time; where it comes too soon it does nothing."""
        if self._stopped:
            return
        when = min(self.membership.next_wakeup, self.election.next_wakeup)
        if self._timer is not None:
            if self._due <= when:
                return
            self._timer.cancel()
        self._due = when
        delay = max(when - monotonic(), 0.0) + TIMER_SECONDS
        self._timer = self._loop.call_later(delay, self._tick)

    def _run(
        self, kind: str, instructions: Sequence[Instruction] | Sequence[ElectionInstruction]
    ) -> None:
        changed = False
        for instruction in instructions:
            match instruction:
                case SendTo(peer, payload):
                    self._connections.post(peer, Message(kind, {_PAYLOAD: payload}))
                case Misbehaved(peer, offence, about):
                    self._guard.note(peer, offence, about)
                case MemberUpdated():
                    changed = True
                    self._on_changed(instruction)
                case CoordinatorIs(member_id, term, reason):
                    self._set_coordinator(MeshCoordinator(member_id, self._name(member_id), term))
                    log.info("coordinator", id=member_id[:16], term=term, why=reason)
                case CoordinatorLost(reason):
                    self._set_coordinator(None)
                    log.info("coordinator_lost", why=reason)
        if changed:
            self._report_election()

    def _on_changed(self, change: MemberUpdated) -> None:
        record = change.record
        log.info(
            "member", name=record.name, id=record.id[:16], state=record.state, why=change.reason
        )
        certain = record.certain or record.state is MemberState.LEFT
        described = record.state is change.previous_state is MemberState.ALIVE
        self._tell(MemberChanged(_member(record), change.reason, certain, described))
        self._rename_coordinator(record)
        if record.state is MemberState.DEAD and record.id != self._self_id:
            # A frozen device's link stays open; who waits for it must not.
            self._connections.cut(record.id, "the device was declared dead")

    def _report_election(self) -> None:
        records = self.membership.members.values()
        alive = frozenset(record.id for record in records if record.state in _LIVE)
        event = MembersChanged(alive | {self._self_id})
        self._run_election(self.election.handle(event, monotonic()))

    def _run_election(self, instructions: Sequence[ElectionInstruction]) -> None:
        self._keep_term(self.election.term)  # on disk before any device receives it
        self._run(ELECTION_KIND, instructions)

    def _rename_coordinator(self, record: MemberRecord) -> None:
        known = self.coordinator
        if known is not None and known.id == record.id and known.name != record.name:
            self._set_coordinator(replace(known, name=record.name))

    def _set_coordinator(self, coordinator: MeshCoordinator | None) -> None:
        self.coordinator = coordinator
        self._tell(CoordinatorChanged(coordinator))

    def _name(self, member_id: str) -> str:
        record = self.membership.members.get(member_id)
        return record.name if record is not None else member_id[:16]


def _member(record: MemberRecord) -> MeshMember:
    return MeshMember(record.id, record.name, record.state, record.info)


FLOW_BYTES = 4096
"""So much more than before is traffic. Probes and their answers alone take seconds for it."""


class TrafficWatch:
    """Pure: shown the counters now and then, it says whose have grown."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}  # peer -> its bytes when it was last said to have sent
        self._seen: dict[str, StreamArrival] = {}  # at the last look
        self._looked = float("-inf")

    def look(self, arrivals: Mapping[str, StreamArrival], now: float) -> LinkTraffic | None:
        """Peers whose counters have grown since the last look, and by FLOW_BYTES; None: no peer.

        All is dated to the last look, so no later than it came.

        Args:
            arrivals: over each open link, since it is open.
            now: seconds of a monotonic clock.
        """
        came: dict[str, float] = {}
        signs: dict[str, float] = {}
        counted: dict[str, int] = {}
        for peer, arrival in arrivals.items():
            count = arrival.received_bytes
            before = self._counted.get(peer)
            last = self._seen.get(peer)
            if before is None or last is None or count < before:  # another link
                counted[peer] = count
                continue
            if count - before >= FLOW_BYTES:
                counted[peer] = count
                came[peer] = self._looked
            else:
                counted[peer] = before
            if arrival != last:
                signs[peer] = self._looked
        self._counted, self._seen, self._looked = counted, dict(arrivals), now
        return LinkTraffic(came, signs) if signs else None
