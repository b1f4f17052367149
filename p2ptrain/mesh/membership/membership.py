"""Which devices are members, and which are alive: SWIM with suspicion, refutation, local health.

Sources: SWIM (Das, Gupta, Motivala, DSN 2002); Lifeguard (Dadgar, Phillips, Currey, 2017).
Two things differ from both, because every pair of members keeps a reliable ordered link (TLS):

* The end of a link is evidence. A killed process ends all its links within milliseconds; a redial
  that is refused, or helpers that lost theirs too, make the verdict certain at once. A frozen
  process or a pulled cable ends nothing, and is found by its silence.
* News is not repeated against loss (dissemination.py). Tables are compared when a link comes up.

This class is a pure core: no clock, no socket, no task. Feed it events and ticks with the time
(seconds of any monotonic clock); carry out what it returns. Call it at `next_wakeup` at the
latest: a late call is how it learns that its process was frozen.

    failure_detector.py  finds silence            dissemination.py  spreads news
    suspicion.py         gives time to refute     member_table.py   decides which claims count
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from random import Random

from p2ptrain.errors import InternalError
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.interface import GONE, MemberState
from p2ptrain.mesh.membership.core_events import (
    Info,
    Instruction,
    Leave,
    LinkTraffic,
    MemberRecord,
    MembershipEvent,
    MemberUpdated,
    MessageReceived,
    Misbehaved,
    PeerLinkLost,
    PeerLinkUp,
    SelfChanged,
    TrustChanged,
)
from p2ptrain.mesh.membership.core_messages import (
    Claim,
    MembershipKind,
    MembershipMessage,
    check_record,
    decode,
)
from p2ptrain.mesh.membership.dissemination import Dissemination
from p2ptrain.mesh.membership.failure_detector import FailureDetector, SilenceFinding, SilentWitness
from p2ptrain.mesh.membership.member_table import LIVE, LinkState, MemberTable, supersedes
from p2ptrain.mesh.membership.membership_config import MembershipConfig
from p2ptrain.mesh.membership.suspicion import Suspicion, group_factor

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
        self._config = config
        self._rng = rng
        self._table = MemberTable(me, config)
        self._table.trust(trusted)
        self._links = LinkState()
        self._suspicions: dict[str, Suspicion] = {}  # exactly the members in state SUSPECT
        self._returned: dict[str, float] = {}  # when members that were away came back
        self._goodbyes: dict[str, tuple[int, float]] = {}  # linked -> incarnation, when sent
        shared = (config, rng)
        self._sending = Dissemination(self._table, self._links, self._suspicions, *shared)
        self._detector = FailureDetector(self._table, self._links, self._sending, *shared)
        self._now = float("-inf")
        self._answered = float("-inf")  # when a member last answered a probe, late answers too
        self._woke = float("-inf")  # end of the last freeze of this process
        self._next_question = float("-inf")  # when a suspect is asked for again at the soonest
        self._next_wakeup = float("-inf")

    @property
    def members(self) -> Mapping[str, MemberRecord]:
        """By id, this device included; read-only and live."""
        return self._table.records

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest; -inf before the first call, inf after a leave."""
        return self._next_wakeup

    @property
    def refused_claims(self) -> int:
        """Claims refused so far: untrusted ids, absurd incarnations, a full table."""
        return self._table.refused_claims

    @property
    def health_score(self) -> int:
        """0 = healthy; above, this device doubts itself before others."""
        return self._detector.health.score

    def handle(self, event: MembershipEvent, now: float) -> list[Instruction]:
        """Take in one event.

        Raises:
            ProtocolError: the payload, or what SelfChanged gives, is not what the protocol allows;
                nothing was changed. A peer's link should be closed.
        """
        message = (
            decode(MembershipMessage, event.payload) if isinstance(event, MessageReceived) else None
        )
        self._begin(now)
        if self._has_left:
            return []
        match event:
            case MessageReceived(peer) if message is not None:
                self._on_message(peer, message)
            case PeerLinkUp(peer):
                self._links.up(peer, self._now)
                self._sending.sync_with(peer, answer=False)
            case PeerLinkLost(peer, refused):
                self._on_link_lost(peer, refused)
            case LinkTraffic(came, signs):
                self._on_traffic(came, signs)
            case Leave():
                self._put_self(dataclasses.replace(self._table.me, state=MemberState.LEFT))
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
        if self._has_left:
            return []
        self._judge_suspects()
        for finding in self._detector.tick(self._now):
            self._on_finding(finding)
        self._ask_again()
        self._sending.tick(self._now)
        self._table.forget_old(self._now)
        return self._finish()

    # -- time ------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        first = self._now == float("-inf")
        self._now = max(self._now, now)
        if first:
            self._detector.schedule_first(self._now)
            self._sending.schedule_first(self._now)
        elif self._config.local_health:
            frozen = self._detector.health.frozen_seconds(self._next_wakeup, self._now)
            if frozen:
                self._wake_up(frozen)

    def _wake_up(self, frozen_seconds: float) -> None:
        self._woke = self._now
        self._detector.wake_up()
        not_before = self._now + self._config.wake_grace_seconds
        for suspicion in self._suspicions.values():
            suspicion.pause(frozen_seconds, not_before)

    def _just_woke(self) -> bool:
        return self._now - self._woke < self._config.wake_grace_seconds

    def _finish(self) -> list[Instruction]:
        self._sending.gossip(self._now)
        due = min(
            self._now + self._config.heartbeat_seconds,
            self._detector.next_due(),
            self._sending.next_due(),
        )
        for suspicion in self._suspicions.values():
            due = min(due, suspicion.deadline)
        self._next_wakeup = float("inf") if self._has_left else max(due, self._now)
        out, self._sending.out = self._sending.out, []
        return out

    # -- events ----------------------------------------------------------------------------

    def _on_message(self, peer: str, message: MembershipMessage) -> None:
        if peer == self._table.me.id or not self._table.trusts(peer):
            self._table.refused_claims += 1
            return
        if not self._just_woke():  # right after a freeze, what is read may be as old as that
            self._links.heard(peer, self._now)
            self._on_sign(peer, self._now)
        for claim in message.claims:
            self._learn(claim, peer)
        match message.kind:
            case MembershipKind.PING:
                self._sending.send(
                    peer, MembershipMessage(MembershipKind.ACK, sequence=message.sequence)
                )
            case MembershipKind.ACK:
                self._on_answer(*self._detector.on_ack(peer, message.sequence, self._now))
            case MembershipKind.REQUEST:
                suspicion = self._suspicions.get(message.target)
                self._detector.on_request(peer, message, self._now, suspicion)
            case MembershipKind.NACK:
                finding = self._detector.on_nack(peer, message)
                if finding is not None:
                    self._on_finding(finding)
            case MembershipKind.SYNC:
                self._sending.on_sync(peer, message)
            case MembershipKind.GOSSIP:
                pass  # its claims were all of it

    def _on_traffic(self, came: Mapping[str, float], signs: Mapping[str, float]) -> None:
        """Whose data comes is there, however long its contradiction takes behind that data.

        Where data comes but no answers do, this device's own cable is full: then all are.
        """
        if self._just_woke():
            return
        for peer, at in signs.items():
            self._on_sign(peer, at)
        evidence = self._config.evidence_seconds
        is_own_cable = self._now - self._answered > evidence
        for peer, at in came.items():
            self._links.flowed(peer, at)
            for suspect, suspicion in self._suspicions.items():
                if is_own_cable or suspect == peer:
                    suspicion.wait_until(at + evidence)

    def _on_sign(self, peer: str, at: float) -> None:
        """It gave a sign of life then, though none that it receives from us.

        Where a cable is full, what it says waits for seconds behind what was lost before, and it
        hears nothing for as long, and yet it speaks. A frozen one is silent before it is suspect.
        """
        self._links.gave_sign(peer, at)
        suspicion = self._suspicions.get(peer)
        if suspicion is not None:
            config = self._config
            suspicion.excuse(at, config.evidence_seconds, config.excuse_seconds)

    def _on_answer(self, who: str, at: float) -> None:
        """A device that answers is alive, however late, and refutes when it gets the suspicion."""
        if self._just_woke():
            return
        self._answered = self._now
        suspicion = self._suspicions.get(who)
        if suspicion is not None:
            suspicion.wait_until(at + self._config.evidence_seconds)

    def _on_link_lost(self, peer: str, refused: bool) -> None:
        self._links.lost(peer)
        self._detector.link_lost(peer)
        record = self._table.records.get(peer)
        unsure = record is not None and record.state is not MemberState.LEFT and not record.certain
        if self._has_goodbye(peer):
            self._believe_goodbye(peer)
        elif record is not None and refused and unsure:
            reason = "its link ended and its address refuses connections: its process ended"
            self._declare_dead(record, reason, certain=True)
        elif record is None or record.state in GONE:
            self._links.forget_loss(peer)
        else:
            if not self._just_woke():  # else others may have closed it because we were silent
                self._accuse(record, "the link to it ended")
            self._detector.probe_now(peer, self._now)

    def _describe_self(self, name: str | None, info: Info | None) -> None:
        me = self._table.me
        described = dataclasses.replace(
            me,
            name=me.name if name is None else name,
            info=me.info if info is None else dict(info),
            incarnation=me.incarnation + 1,
        )
        check_record(described)
        self._put_self(described)
        self._emit(MemberUpdated(described, me.state, "this device has a new description"))

    def _on_trust_changed(self, trusted: frozenset[str] | None) -> None:
        for record in self._table.trust(trusted):
            self._drop_traces(record.id)
            self._sending.stop_spreading(record.id)
            if record.state in LIVE:
                dead = dataclasses.replace(record, state=MemberState.DEAD, certain=True)
                self._emit(MemberUpdated(dead, record.state, "it is no longer paired"))

    # -- claims of others ------------------------------------------------------------------

    def _learn(self, claim: Claim, peer: str) -> None:
        record = claim.record
        if self._table.refusal(record, peer) is not None:
            if not self._table.trusts(record.id):
                self._flag(peer, Offence.STRANGERS, record.id)
            return
        known = self._table.records.get(record.id)
        if record.id == self._table.me.id:
            self._receive_of_self(record, peer)
        elif known is None:
            self._adopt(record, self._hearsay(record, peer), claim.accusers, peer)
        elif supersedes(record, known):
            self._learn_newer(claim, known, peer)
        elif record.state is MemberState.SUSPECT and record.incarnation == known.incarnation:
            self._confirm(known, claim.accusers or (peer,), peer)
        elif peer == record.id and record != known:
            # a restarted device does not know its last incarnation
            self._sending.correct(peer, known, self._now)

    def _learn_newer(self, claim: Claim, known: MemberRecord, peer: str) -> None:
        """Believe it, unless it ends a process that we still receive from, which may refute first.

        Doubt once only, in state ALIVE: doubting the answer too would go on without end. A goodbye
        is believed once the link to who left has ended too, which it does at once.
        """
        record = claim.record
        is_hearsay = known.state in LIVE and peer != record.id
        heard = self._receives_from(record.id)
        self._judge_reporter(record, known, peer, heard=heard)
        linked = heard or self._links.is_up(record.id)
        if is_hearsay and record.state is MemberState.LEFT and linked:
            self._goodbyes[record.id] = (record.incarnation, self._now)
            return
        died = record.state is MemberState.DEAD
        restarted = record.instance != known.instance and known.state is MemberState.ALIVE
        doubtful = heard or (died and self._links.is_up(record.id) and self._was_away(peer))
        doubted = is_hearsay and doubtful and (died or restarted)
        if not doubted:
            self._adopt(record, self._hearsay(record, peer), claim.accusers, peer)
        elif known.state is MemberState.ALIVE:
            suspect = dataclasses.replace(
                known, incarnation=record.incarnation, state=MemberState.SUSPECT
            )
            reason = f"{self._name(peer)} says its process ended, but it was heard from here"
            self._adopt(suspect, reason, (peer,), peer)

    def _judge_reporter(
        self, record: MemberRecord, known: MemberRecord, peer: str, *, heard: bool
    ) -> None:
        """Note what is not so by this device's own hearing; others count it."""
        if peer == record.id:
            if record.name != known.name:
                self._flag(peer, Offence.RENAMES)
            return
        if record.name != known.name:
            self._flag(peer, Offence.FALSE_NAMES, record.id)
        if heard and known.state in LIVE and record.state in GONE:
            self._flag(peer, Offence.FALSE_END, record.id)
        elif heard and known.state is MemberState.ALIVE and record.state is MemberState.SUSPECT:
            self._flag(peer, Offence.FALSE_SUSPICION, record.id)

    def _believe_goodbye(self, device: str) -> None:
        """It was reported to have left, and now this device receives nothing from it either."""
        incarnation, _ = self._goodbyes.pop(device)
        known = self._table.records[device]
        left = dataclasses.replace(
            known,
            incarnation=max(incarnation, known.incarnation),
            state=MemberState.LEFT,
            certain=False,
        )
        self._adopt(left, "left: others say so, and its link ended", (), None)

    def _has_goodbye(self, device: str) -> bool:
        """Whether others said just now that it left: who leaves ends its links at once."""
        if device not in self._goodbyes:
            return False
        _, said_at = self._goodbyes[device]
        return self._now - said_at <= self._config.goodbye_seconds

    def _was_away(self, peer: str) -> bool:
        """Whether it is away or was until now: then it did not receive from others either."""
        known = self._table.records.get(peer)
        if known is not None and known.state is not MemberState.ALIVE:
            return True
        return self._now - self._returned.get(peer, -math.inf) <= self._config.return_seconds

    def _receive_of_self(self, record: MemberRecord, peer: str) -> None:
        """Contradict whatever would replace our own word about ourselves."""
        me = self._table.me
        foreign = record.instance != me.instance and record.incarnation >= me.incarnation
        if supersedes(record, me) or foreign:
            self._put_self(dataclasses.replace(me, incarnation=record.incarnation + 1))
        elif record.state is not MemberState.ALIVE:
            self._sending.correct(peer, me, self._now)

    def _put_self(self, record: MemberRecord) -> None:
        self._table.put(record, self._now)
        self._sending.spread(record, eager=True)

    def _adopt(
        self, record: MemberRecord, reason: str, accusers: tuple[str, ...], peer: str | None
    ) -> None:
        """Believe `record`, report and spread it; `peer` sent it (None: found here)."""
        known = self._table.records.get(record.id)
        previous = self._bury_predecessor(record, known)
        if record.state is MemberState.ALIVE and previous not in (None, MemberState.ALIVE):
            self._returned[record.id] = self._now
        self._table.put(record, self._now)
        self._suspicions.pop(record.id, None)
        self._goodbyes.pop(record.id, None)
        self._report(record, known, previous, reason)
        if record.state is MemberState.SUSPECT:
            self._suspect(record, accusers or ((peer,) if peer else ()))
        elif record.state in GONE:
            self._drop_traces(record.id)
        self._sending.spread(record, () if peer is None else (peer,))
        if peer is None and self._links.is_up(record.id):
            # so that it can contradict at once
            claim = self._sending.claim(record)
            self._sending.send(record.id, MembershipMessage(MembershipKind.GOSSIP, (claim,)))

    def _bury_predecessor(
        self, record: MemberRecord, known: MemberRecord | None
    ) -> MemberState | None:
        """Report the end of the process that a newer one of the same device replaces.

        Returns the state from which the device changes.
        """
        if known is None:
            return None
        if known.instance == record.instance or record.state in GONE:
            return known.state
        if known.certain or known.state is MemberState.LEFT:
            return known.state
        dead = dataclasses.replace(known, state=MemberState.DEAD, certain=True)
        self._emit(MemberUpdated(dead, known.state, "a new process of the same device replaced it"))
        return MemberState.DEAD

    def _report(
        self,
        record: MemberRecord,
        known: MemberRecord | None,
        previous: MemberState | None,
        reason: str,
    ) -> None:
        if known is None and record.state in GONE:
            return  # gone before we came: remembered, but nothing that happened here
        same = known is not None and _shown(known) == _shown(record)
        if record.state is not previous or not same:
            self._emit(MemberUpdated(record, previous, reason))

    # -- findings and suspicions -----------------------------------------------------------

    def _on_finding(self, finding: SilenceFinding | SilentWitness) -> None:
        if isinstance(finding, SilentWitness):
            self._on_silent_witness(finding)
            return
        record = self._table.records.get(finding.target)
        if record is None or record.state in GONE:
            return
        if finding.certain:
            self._declare_dead(record, finding.reason)
        else:
            self._accuse(record, finding.reason)

    def _on_silent_witness(self, witness: SilentWitness) -> None:
        suspicion = self._suspicions.get(witness.target)
        if suspicion is not None:
            config = self._config
            seconds, most_seconds = config.evidence_seconds, config.excuse_seconds
            suspicion.lack_witness(witness.at, self._now, seconds, most_seconds)

    def _accuse(self, record: MemberRecord, reason: str) -> None:
        """This device itself found `record` silent."""
        accusers = (self._table.me.id,)
        if self._has_goodbye(record.id):
            self._believe_goodbye(record.id)
        elif record.state is MemberState.SUSPECT:
            self._confirm(record, accusers, None)
        else:
            suspect = dataclasses.replace(record, state=MemberState.SUSPECT)
            self._adopt(suspect, reason, accusers, None)

    def _suspect(self, record: MemberRecord, accusers: tuple[str, ...]) -> None:
        config, members = self._config, len(self._table.live())
        expected = max(0, min(config.confirmations, members - 2))
        least = config.suspicion_least_seconds * group_factor(members)
        bounds = (least, least * config.suspicion_greatest_factor)
        suspicion = Suspicion(self._now, expected, bounds)
        suspicion.confirm(accusers)
        self._suspicions[record.id] = suspicion
        ours = self._table.me.id in accusers
        suspicion.is_probed = ours or self._rng.random() * members < _CONFIRMERS
        if suspicion.is_probed and not ours and not self._just_woke():
            self._detector.probe_now(record.id, self._now)

    def _confirm(self, record: MemberRecord, accusers: tuple[str, ...], peer: str | None) -> None:
        suspicion = self._suspicions.get(record.id)
        if suspicion is not None and suspicion.confirm(accusers):
            self._sending.spread(record, () if peer is None else (peer,))

    def _ask_again(self) -> None:
        """Look for signs of the two suspects that are judged next, in turn.

        Seldom probes are of no use to them, and there may be little room for more questions.
        """
        if self._suspicions and self._now >= self._next_question:
            self._next_question = self._now + self._config.probe_deadline_seconds
            by_deadline = sorted(self._suspicions.items(), key=lambda item: item[1].deadline)
            device, suspicion = min(by_deadline[:2], key=lambda item: item[1].asked_at)
            suspicion.asked_at = self._now
            if suspicion.is_probed:
                self._detector.ask_again(device, self._now)

    def _judge_suspects(self) -> None:
        for device, suspicion in sorted(self._suspicions.items()):
            if suspicion.deadline > self._now:
                continue
            if self._is_alone_with(device, suspicion):
                suspicion.wait_until(self._now + self._config.heartbeat_seconds)
            else:
                names = ", ".join(self._name(accuser) for accuser in suspicion.accusers)
                seconds = suspicion.seconds(self._now)
                reason = f"suspect for {seconds:.1f} s without contradicting; found so by {names}"
                self._declare_dead(self._table.records[device], reason)

    def _is_alone_with(self, device: str, suspicion: Suspicion) -> bool:
        """Whether one member alone finds it silent, though others answer here.

        They would by now: that member receives too little, its cable is full. Where it is
        this device, others may be received from seldom.
        """
        since = self._now - 2 * self._config.evidence_seconds
        is_alone = len(suspicion.accusers) == 1 and len(self._table.live()) > 2
        is_long = suspicion.seconds(self._now) >= self._config.excuse_seconds
        return is_alone and not is_long and self._links.others_since(since, device)

    def _declare_dead(self, record: MemberRecord, reason: str, *, certain: bool = False) -> None:
        dead = dataclasses.replace(record, state=MemberState.DEAD, certain=certain)
        self._adopt(dead, reason, (), None)

    def _drop_traces(self, device: str) -> None:
        """A member that is gone has no probes, no suspicion and no lost link."""
        self._detector.forget(device)
        self._suspicions.pop(device, None)
        self._links.forget_loss(device)
        self._returned.pop(device, None)
        self._goodbyes.pop(device, None)

    # -- small things ----------------------------------------------------------------------

    @property
    def _has_left(self) -> bool:
        return self._table.me.state is MemberState.LEFT

    def _emit(self, change: MemberUpdated) -> None:
        self._sending.out.append(change)

    def _flag(self, peer: str, offence: Offence, about: str = "") -> None:
        self._sending.out.append(Misbehaved(peer, offence, about))

    def _receives_from(self, device: str) -> bool:
        since = self._now - self._config.evidence_seconds
        suspicion = self._suspicions.get(device)
        if suspicion is not None and suspicion.has_sign_since(since, self._config.excuse_seconds):
            return True
        return self._links.last_heard(device) >= since or self._links.last_flow(device) >= since

    def _name(self, device: str) -> str:
        record = self._table.records.get(device)
        return device if record is None else record.name

    def _hearsay(self, record: MemberRecord, peer: str) -> str:
        source = "it says so itself" if peer == record.id else f"{self._name(peer)} says so"
        return f"{record.state.value}: {source}"


def _shown(record: MemberRecord) -> tuple[object, ...]:
    """The fields of a record whose changes the user and the rooms above get, besides its state."""
    return record.name, record.info, record.certain
