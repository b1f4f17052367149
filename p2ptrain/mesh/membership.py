"""Who is in the household, and who is alive: SWIM with suspicion, refutation and local health.

Sources: SWIM (Das, Gupta, Motivala, DSN 2002); Lifeguard (Dadgar, Phillips, Currey, 2017).
Two things differ from both, because every pair of members keeps a reliable ordered link (TLS):

* The end of a link is evidence. A killed process ends all its links within milliseconds; a redial
  that is refused, or helpers that lost theirs too, make the verdict certain at once. A frozen
  process or a pulled cable ends nothing, and is found by its silence.
* News is not repeated against loss; see broadcasts.py. Tables are compared when a link comes up.

This class is a pure core: no clock, no socket, no task. Feed it events and ticks with the time
(seconds of any monotonic clock); carry out what it returns. It must be called at `next_wakeup`
at the latest: being called later is how it learns that its process was frozen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from random import Random

from p2ptrain.errors import InternalError
from p2ptrain.mesh.broadcasts import BroadcastQueue
from p2ptrain.mesh.events import (
    Changed,
    Instruction,
    Leave,
    LinkLost,
    LinkUp,
    MemberRecord,
    MembershipEvent,
    MessageReceived,
    SelfChanged,
    SendTo,
    TrustChanged,
)
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.local_health import LocalHealth
from p2ptrain.mesh.member_table import GONE, LIVE, MemberTable, supersedes
from p2ptrain.mesh.membership_config import HOME_LAN, MembershipConfig
from p2ptrain.mesh.membership_wire import (
    CLAIMS_LIMIT,
    ENVELOPE_BYTES,
    Claim,
    Kind,
    MembershipMessage,
    check_record,
    claim_bytes,
    decode,
    encode,
)
from p2ptrain.mesh.probing import Probe, Prober, Relay
from p2ptrain.mesh.suspicion import Suspicion

__all__ = [
    "HOME_LAN",
    "Changed",
    "Leave",
    "LinkLost",
    "LinkUp",
    "MemberRecord",
    "Membership",
    "MembershipConfig",
    "MessageReceived",
    "SelfChanged",
    "SendTo",
    "TrustChanged",
]

_CONFIRMERS = 8  # members that probe a suspect at once, on average, so that others confirm soon


class Membership:
    """One device's view of its household.

    Args:
        self_record: this device; its state is ignored. `incarnation` should be higher than in
            its last run where that is known; where it is not, the others tell.
        config: see MembershipConfig.
        rng: seeded by the caller; the only source of chance.
        trusted: ids of paired devices, as in `TrustChanged`; None trusts all.

    Raises:
        ProtocolError: name, id or info of `self_record` is out of bounds.
    """

    def __init__(
        self,
        self_record: MemberRecord,
        config: MembershipConfig,
        rng: Random,
        trusted: frozenset[str] | None = None,
    ) -> None:
        instance = self_record.instance or f"{rng.getrandbits(64):016x}"
        me = dataclasses.replace(self_record, state=MemberState.ALIVE, instance=instance)
        check_record(me)
        self._self_id = me.id
        self._config = config
        self._rng = rng
        self._table = MemberTable(me, config)
        self._table.trust(trusted)
        self._health = LocalHealth(config.health_score_limit, config.late_tick_seconds)
        self._prober = Prober(rng, config.relays_limit)
        self._news = BroadcastQueue(config.gossip_limit_factor)
        self._suspicions: dict[str, Suspicion] = {}  # exactly the members in state SUSPECT
        self._links: set[str] = set()  # peers with a link
        self._lost_links: set[str] = set()  # peers that had a link and have none now
        self._heard: dict[str, float] = {}  # peer -> time of its last message; linked peers only
        self._out: list[Instruction] = []
        self._eager = False  # tell eager_fanout members at once at the end of this call
        self._now = float("-inf")
        self._woke = float("-inf")  # end of the last freeze of this process
        self._next_probe = self._next_sync = self._next_reconnect = self._next_gossip = 0.0
        self._next_wakeup = float("-inf")

    @property
    def members(self) -> Mapping[str, MemberRecord]:
        """By id, this device included; read-only and live."""
        return self._table.records

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest; -inf before the first call."""
        return self._next_wakeup

    @property
    def refused_claims(self) -> int:
        """Claims refused so far: untrusted ids, absurd incarnations, a full table."""
        return self._table.refused_claims

    @property
    def health_score(self) -> int:
        """0 = healthy; above, this device doubts itself before others."""
        return self._health.score

    def handle(self, event: MembershipEvent, now: float) -> list[Instruction]:
        """Take in one event.

        Raises:
            ProtocolError: the payload is not what the protocol allows; nothing was changed, the
                link to that peer should be closed.
        """
        message = decode(event.payload) if isinstance(event, MessageReceived) else None
        self._begin(now)
        if self._me.state is MemberState.LEFT:
            return []
        match event:
            case MessageReceived(peer) if message is not None:
                self._on_message(peer, message)
            case LinkUp(peer):
                self._on_link_up(peer)
            case LinkLost(peer, refused):
                self._on_link_lost(peer, refused)
            case Leave():
                self._on_leave()
            case SelfChanged(name, info):
                self._describe_self(name, info)
            case TrustChanged(trusted):
                self._on_trust_changed(trusted)
            case _:
                raise InternalError(f"membership has no rule for {type(event).__name__}")
        return self._finish()

    def tick(self, now: float) -> list[Instruction]:
        """Do what is due."""
        self._begin(now)
        if self._me.state is MemberState.LEFT:
            return []
        self._judge_suspects()
        self._judge_probes()
        for relay in self._prober.pop_relays(now=self._now):
            self._answer_relay(relay)
        self._probe_next()
        self._sync_next()
        self._reconnect_next()
        self._table.forget_old(self._now)
        return self._finish()

    # -- time ------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        first = self._now == float("-inf")
        self._now = max(self._now, now)
        if first:
            self._schedule_first()
        elif self._config.local_health:
            frozen = self._health.frozen_seconds(self._next_wakeup, self._now)
            if frozen:
                self._wake_up(frozen)

    def _schedule_first(self) -> None:
        config = self._config
        self._next_probe = self._now + self._rng.uniform(0, config.probe_interval_seconds)
        self._next_sync = self._now + self._rng.uniform(0, config.sync_interval_seconds)
        self._next_reconnect = self._now + config.reconnect_interval_seconds
        self._next_gossip = self._now

    def _wake_up(self, frozen_seconds: float) -> None:
        """Nothing that did not arrive during the freeze proves anything."""
        self._woke = self._now
        self._prober.clear()
        grace = self._now + self._config.wake_grace_seconds
        for suspicion in self._suspicions.values():
            suspicion.pause(frozen_seconds, grace)

    def _finish(self) -> list[Instruction]:
        self._gossip()
        times = [
            self._now + self._config.heartbeat_seconds,
            self._next_probe,
            self._next_sync,
            self._next_reconnect,
            self._prober.next_due(),
        ]
        times += [suspicion.deadline for suspicion in self._suspicions.values()]
        if self._news:
            times.append(self._next_gossip)
        self._next_wakeup = max(min(times), self._now)
        out, self._out = self._out, []
        return out

    # -- sending ---------------------------------------------------------------------------

    def _send(self, peer: str, message: MembershipMessage) -> None:
        """Send `message` with what `peer` must know of itself, and with news that fits."""
        claims = list(message.claims)
        view = self._table.records.get(peer)
        if view is not None and view.state is not MemberState.ALIVE:
            claims.append(self._claim(view))
        if peer not in self._lost_links:
            used = sum(claim_bytes(claim) for claim in claims)
            room = self._config.message_limit_bytes - ENVELOPE_BYTES - used
            claims += self._news.take(peer, room)
        full = dataclasses.replace(message, claims=tuple(claims))
        self._out.append(SendTo(peer, encode(full)))

    def _gossip(self) -> None:
        """Pass news on: at once to a few, later to the others."""
        if not self._news or (self._now < self._next_gossip and not self._eager):
            return
        peers = [p for p in self._live_others() if p not in self._lost_links]
        untold = self._news.untold(peers)
        fanout = self._config.eager_fanout if self._eager else self._config.gossip_fanout
        for peer in self._sample(untold, fanout):
            self._send(peer, MembershipMessage(Kind.GOSSIP))
        self._news.prune(peers)
        self._eager = False
        self._next_gossip = self._now + self._config.gossip_interval_seconds

    def _sync_with(self, peer: str, *, answer: bool) -> None:
        me = (Claim(self._me),)
        digest = self._table.digest()
        self._send(peer, MembershipMessage(Kind.SYNC, me, digest=digest, answer=answer))

    def _send_table(self, peer: str) -> None:
        room = self._config.message_limit_bytes - ENVELOPE_BYTES
        page: list[Claim] = []
        used = 0
        for record in list(self._table.records.values()):
            claim = self._claim(record)
            size = claim_bytes(claim)
            if page and (used + size > room or len(page) == CLAIMS_LIMIT // 2):
                self._send_page(peer, page)
                page, used = [], 0
            page.append(claim)
            used += size
        self._send_page(peer, page)

    def _send_page(self, peer: str, page: list[Claim]) -> None:
        self._out.append(SendTo(peer, encode(MembershipMessage(Kind.GOSSIP, tuple(page)))))

    # -- events ----------------------------------------------------------------------------

    def _on_message(self, peer: str, message: MembershipMessage) -> None:
        if peer == self._self_id or not self._table.trusts(peer):
            self._table.refused_claims += 1
            return
        if peer in self._links:
            self._heard[peer] = self._now
        for claim in message.claims:
            self._learn(claim, peer)
        match message.kind:
            case Kind.PING:
                self._send(peer, MembershipMessage(Kind.ACK, sequence=message.sequence))
            case Kind.ACK:
                self._on_ack(peer, message.sequence)
            case Kind.REQUEST:
                self._on_request(peer, message)
            case Kind.NACK:
                self._on_nack(peer, message)
            case Kind.SYNC:
                self._on_sync(peer, message)
            case Kind.GOSSIP:
                pass

    def _on_link_up(self, peer: str) -> None:
        self._lost_links.discard(peer)
        self._links.add(peer)
        self._heard[peer] = self._now
        self._sync_with(peer, answer=False)

    def _on_link_lost(self, peer: str, refused: bool) -> None:
        self._links.discard(peer)
        self._lost_links.add(peer)
        self._heard.pop(peer, None)
        for relay in self._prober.pop_relays(target=peer):
            self._answer_relay(relay)
        record = self._table.records.get(peer)
        if record is None or record.state in GONE:
            self._lost_links.discard(peer)
            return
        if refused:
            self._declare_dead(record, "its link ended and a redial was refused: its process ended")
            return
        if not self._just_woke():
            self._accuse(record, "the link to it ended")
        self._prober.forget(peer)
        self._probe(peer)

    def _on_leave(self) -> None:
        left = dataclasses.replace(self._me, state=MemberState.LEFT)
        self._table.put(left, self._now)
        self._news.put(Claim(left))
        self._eager = True

    def _describe_self(
        self, name: str | None, info: Mapping[str, int | float | str] | None
    ) -> None:
        me = self._me
        described = dataclasses.replace(
            me,
            name=me.name if name is None else name,
            info=me.info if info is None else dict(info),
            incarnation=me.incarnation + 1,
        )
        check_record(described)
        self._put_self(described)
        self._out.append(Changed(described, me.state, "this device describes itself anew"))

    def _on_trust_changed(self, trusted: frozenset[str] | None) -> None:
        for record in self._table.trust(trusted):
            self._drop_traces(record.id)
            self._news.discard(record.id)
            if record.state in LIVE:
                dead = dataclasses.replace(record, state=MemberState.DEAD)
                self._out.append(Changed(dead, record.state, "it is no longer paired"))

    # -- probes ----------------------------------------------------------------------------

    def _probe_next(self) -> None:
        if self._now < self._next_probe:
            return
        interval = self._config.probe_interval_seconds * self._health.multiplier
        self._next_probe = max(self._next_probe + interval, self._now)
        target = self._prober.next_target(self._live_others())
        if target is not None and not self._prober.is_probing(target):
            self._probe(target)

    def _probe(self, target: str) -> None:
        due = self._now + self._config.probe_timeout_seconds * self._health.multiplier
        number = self._prober.start(target, self._now, due)
        if target in self._lost_links:
            self._ask_helpers(number, self._prober.probes[number])
        else:
            self._send(target, MembershipMessage(Kind.PING, sequence=number))

    def _ask_helpers(self, number: int, probe: Probe) -> None:
        others = [
            peer
            for peer in self._live_others()
            if peer != probe.target and peer not in self._lost_links
        ]
        probe.helpers = tuple(self._sample(others, self._config.helpers))
        probe.indirect = True
        deadline = self._config.probe_deadline_seconds * self._health.multiplier
        probe.due = probe.started + deadline
        claim = (self._claim(self._table.records[probe.target]),)
        for helper in probe.helpers:
            request = MembershipMessage(Kind.REQUEST, claim, number, probe.target)
            self._send(helper, request)

    def _judge_probes(self) -> None:
        for number, probe in self._prober.due_probes(self._now):
            if probe.indirect:
                del self._prober.probes[number]
                self._on_probe_failed(probe)
            else:
                self._ask_helpers(number, probe)

    def _on_probe_failed(self, probe: Probe) -> None:
        if self._config.local_health:
            missing = set(probe.helpers) - probe.nacks
            self._health.penalise(len(missing))
        record = self._table.records.get(probe.target)
        if record is not None and record.state in LIVE:
            waited = self._now - probe.started
            self._accuse(record, f"it did not answer a probe within {waited:.1f} s")

    def _on_ack(self, peer: str, sequence: int) -> None:
        relay = self._prober.relayed(sequence, peer)
        if relay is not None:
            self._send(relay.origin, MembershipMessage(Kind.ACK, sequence=relay.sequence))
        elif self._prober.answered(sequence, peer) is not None:
            self._health.reward()

    def _on_request(self, peer: str, message: MembershipMessage) -> None:
        target = message.target
        due = self._now + self._config.relay_timeout_seconds
        if target == self._self_id:
            self._send(peer, MembershipMessage(Kind.ACK, sequence=message.sequence))
        elif target in self._lost_links:
            self._answer_relay(Relay(peer, message.sequence, target, due))
        elif target in self._table.records:
            number = self._prober.start_relay(peer, message.sequence, target, due)
            if number is not None:
                self._send(target, MembershipMessage(Kind.PING, sequence=number))

    def _answer_relay(self, relay: Relay) -> None:
        lost = relay.target in self._lost_links
        nack = MembershipMessage(Kind.NACK, sequence=relay.sequence, lost=lost)
        self._send(relay.origin, nack)

    def _on_nack(self, peer: str, message: MembershipMessage) -> None:
        probe = self._prober.probes.get(message.sequence)
        if probe is None or peer not in probe.helpers:
            return
        probe.nacks.add(peer)
        if message.lost:
            probe.lost.add(peer)
        record = self._table.records.get(probe.target)
        alone = probe.target not in self._lost_links or probe.lost != set(probe.helpers)
        if record is not None and record.state in LIVE and not alone:
            count = len(probe.lost)
            self._declare_dead(record, f"its links to this device and to {count} others ended")

    # -- tables ----------------------------------------------------------------------------

    def _on_sync(self, peer: str, message: MembershipMessage) -> None:
        if message.digest != self._table.digest():
            self._send_table(peer)
        if message.answer:
            self._sync_with(peer, answer=False)

    def _sync_next(self) -> None:
        if self._now < self._next_sync:
            return
        others = self._live_others()
        stretch = max(1.0, len(others) / 32)
        self._next_sync = self._now + self._config.sync_interval_seconds * stretch
        for peer in self._sample([p for p in others if p not in self._lost_links], 1):
            self._sync_with(peer, answer=True)

    def _reconnect_next(self) -> None:
        if self._now < self._next_reconnect:
            return
        self._next_reconnect = self._now + self._config.reconnect_interval_seconds
        for peer in self._sample(self._table.dead(), 1):
            self._sync_with(peer, answer=True)

    # -- claims ----------------------------------------------------------------------------

    def _learn(self, claim: Claim, peer: str) -> None:
        record = claim.record
        if self._table.refusal(record, peer) is not None:
            return
        if record.id == self._self_id:
            self._hear_of_self(record, peer)
            return
        known = self._table.records.get(record.id)
        if known is None:
            self._adopt(record, self._reason(record, peer), claim.accusers, peer)
        elif supersedes(record, known):
            self._learn_newer(claim, known, peer)
        elif record.state is MemberState.SUSPECT and record.incarnation == known.incarnation:
            self._confirm(known, claim.accusers or (peer,), peer)
        elif peer == record.id and record.instance != known.instance:
            self._send(peer, MembershipMessage(Kind.GOSSIP, (self._claim(known),)))

    def _learn_newer(self, claim: Claim, known: MemberRecord, peer: str) -> None:
        record = claim.record
        if record.state is MemberState.DEAD and peer != record.id and self._has_evidence(record.id):
            if known.state is MemberState.ALIVE or record.incarnation > known.incarnation:
                doubted = dataclasses.replace(record, state=MemberState.SUSPECT)
                self._adopt(doubted, "declared dead elsewhere, but heard from here", (peer,), peer)
            return
        self._adopt(record, self._reason(record, peer), claim.accusers, peer)

    def _hear_of_self(self, record: MemberRecord, peer: str) -> None:
        """Contradict whatever would replace our own word about ourselves."""
        me = self._me
        foreign = record.instance != me.instance and record.incarnation >= me.incarnation
        if supersedes(record, me) or foreign:
            self._put_self(dataclasses.replace(me, incarnation=record.incarnation + 1))
        elif record.state is not MemberState.ALIVE:
            self._send(peer, MembershipMessage(Kind.GOSSIP, (Claim(me),)))

    def _adopt(
        self, record: MemberRecord, reason: str, accusers: tuple[str, ...], peer: str | None
    ) -> None:
        """Believe `record`, tell the shell and spread it; `peer` told us (None: found here)."""
        known = self._table.records.get(record.id)
        previous = self._bury_predecessor(record, known)
        self._table.put(record, self._now)
        self._drop_suspicion(record)
        self._report(record, known, previous, reason)
        if record.state is MemberState.SUSPECT:
            self._suspect(record, accusers or ((peer,) if peer else ()))
        elif record.state in GONE:
            self._drop_traces(record.id)
        told = () if peer is None else (peer,)
        self._news.put(self._claim(record), told)
        if peer is None:
            self._tell_subject(record)

    def _bury_predecessor(
        self, record: MemberRecord, known: MemberRecord | None
    ) -> MemberState | None:
        """Report the end of the process that a newer one of the same device replaces."""
        if known is None:
            return None
        if known.instance == record.instance or known.state in GONE or record.state in GONE:
            return known.state
        dead = dataclasses.replace(known, state=MemberState.DEAD)
        self._out.append(Changed(dead, known.state, "a new process of the same device replaced it"))
        return MemberState.DEAD

    def _report(
        self,
        record: MemberRecord,
        known: MemberRecord | None,
        previous: MemberState | None,
        reason: str,
    ) -> None:
        if known is None and record.state in GONE:
            return  # it was gone before we came: remembered, but no change that happened here
        same = known is not None and (known.name, known.info) == (record.name, record.info)
        if record.state is not previous or not same:
            self._out.append(Changed(record, previous, reason))

    def _tell_subject(self, record: MemberRecord) -> None:
        """Give an accused member the chance to contradict at once."""
        if record.id in self._links:
            self._send(record.id, MembershipMessage(Kind.GOSSIP))

    def _put_self(self, record: MemberRecord) -> None:
        self._table.put(record, self._now)
        self._news.put(Claim(record))
        self._eager = True

    # -- suspicion -------------------------------------------------------------------------

    def _accuse(self, record: MemberRecord, reason: str) -> None:
        """This device itself found `record` silent."""
        if record.state is MemberState.SUSPECT:
            self._confirm(record, (self._self_id,), None)
        else:
            suspect = dataclasses.replace(record, state=MemberState.SUSPECT)
            self._adopt(suspect, reason, (self._self_id,), None)

    def _suspect(self, record: MemberRecord, accusers: tuple[str, ...]) -> None:
        config = self._config
        live = self._table.live()
        expected = max(0, min(config.confirmations, len(live) - 2))
        least = config.suspicion_least_seconds * max(1.0, _log10(len(live)))
        greatest = least * config.suspicion_greatest_factor
        suspicion = Suspicion(record.incarnation, self._now, expected, least, greatest)
        suspicion.confirm(accusers)
        self._suspicions[record.id] = suspicion
        own = self._self_id in accusers
        if not own and not self._just_woke() and self._rng.random() * len(live) < _CONFIRMERS:
            self._prober.forget(record.id)
            self._probe(record.id)

    def _confirm(self, record: MemberRecord, accusers: tuple[str, ...], peer: str | None) -> None:
        suspicion = self._suspicions.get(record.id)
        if suspicion is not None and suspicion.confirm(accusers):
            self._news.put(self._claim(record), () if peer is None else (peer,))

    def _judge_suspects(self) -> None:
        for device, suspicion in sorted(self._suspicions.items()):
            if suspicion.deadline > self._now:
                continue
            names = ", ".join(self._name(accuser) for accuser in suspicion.accusers)
            seconds = suspicion.seconds(self._now)
            record = self._table.records[device]
            self._declare_dead(record, f"silent for {seconds:.1f} s more; found so by {names}")

    def _declare_dead(self, record: MemberRecord, reason: str) -> None:
        dead = dataclasses.replace(record, state=MemberState.DEAD)
        self._adopt(dead, reason, (), None)

    def _drop_suspicion(self, record: MemberRecord) -> None:
        self._suspicions.pop(record.id, None)

    def _drop_traces(self, device: str) -> None:
        """A member that is gone has no probes, no suspicion and no lost link."""
        self._prober.forget(device)
        self._suspicions.pop(device, None)
        self._lost_links.discard(device)

    # -- views -----------------------------------------------------------------------------

    @property
    def _me(self) -> MemberRecord:
        return self._table.records[self._self_id]

    def _live_others(self) -> list[str]:
        return [device for device in self._table.live() if device != self._self_id]

    def _claim(self, record: MemberRecord) -> Claim:
        suspicion = self._suspicions.get(record.id)
        if suspicion is None or record.state is not MemberState.SUSPECT:
            return Claim(record)
        return Claim(record, suspicion.accusers)

    def _sample(self, peers: list[str], count: int) -> list[str]:
        return list(peers) if len(peers) <= count else self._rng.sample(peers, count)

    def _just_woke(self) -> bool:
        return self._now - self._woke < self._config.wake_grace_seconds

    def _has_evidence(self, device: str) -> bool:
        heard = self._heard.get(device, float("-inf"))
        return self._now - heard < self._config.evidence_seconds

    def _name(self, device: str) -> str:
        record = self._table.records.get(device)
        return device if record is None else record.name

    def _reason(self, record: MemberRecord, peer: str) -> str:
        source = "it says so itself" if peer == record.id else f"{self._name(peer)} says so"
        return f"{record.state.value}: {source}"


def _log10(value: int) -> float:
    digits = 0.0
    while value >= 10:
        value //= 10
        digits += 1
    return digits
