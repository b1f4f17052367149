"""Finds members that do not answer: direct probes, probes through helpers, probes for others.

Source: SWIM's failure detector (Das et al. 2002, section 3) with Lifeguard's nack and local health
(Dadgar et al. 2017, section 4). Data that keeps coming over a link answers a probe as well, which
may wait behind it (membership_driver.py). This file finds silence; membership.py decides what
follows.

Local health: a device that was frozen, or that receives nothing from any member, should doubt
itself before it accuses others. Two kinds of evidence raise the score: its own tick was late (the
process was frozen, so every timer that ran out meanwhile proves nothing), and helpers that should
have answered a probe request at once did not. A probe that succeeds lowers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from p2ptrain.mesh.membership.core_messages import MembershipKind, MembershipMessage
from p2ptrain.mesh.membership.dissemination import Dissemination
from p2ptrain.mesh.membership.member_table import LinkState, MemberTable
from p2ptrain.mesh.membership.membership_config import MembershipConfig
from p2ptrain.mesh.membership.probing import Probe, Prober, ProbeRelay
from p2ptrain.mesh.membership.suspicion import Suspicion

_WITNESSES_FACTOR = 2
"""Of a suspect so many times more helpers are asked than otherwise. Raise: more messages while it
lasts. Lower: where one alone gets signs of it, the others declare it dead before they ask that one.
"""


@dataclass(frozen=True, slots=True)
class SilenceFinding:
    """`target` was found silent, or (certain) surely gone."""

    target: str
    certain: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SilentWitness:
    """A member that was asked for the suspect `target` says nothing, though data came from it `at`.

    Its own cable is full: it may be the only one that still receives from the suspect, unnoticed.
    """

    target: str
    at: float


class FailureDetector:
    """Probes one member an interval, answers the probes of others."""

    def __init__(
        self,
        table: MemberTable,
        links: LinkState,
        dissemination: Dissemination,
        config: MembershipConfig,
        rng: Random,
    ) -> None:
        self._table = table
        self._links = links
        self._dissemination = dissemination
        self._config = config
        self._rng = rng
        self._prober = Prober(rng, config.relays_limit)
        self._next_probe = 0.0
        self.health = LocalHealth(config.health_score_limit, config.late_tick_seconds)

    def schedule_first(self, now: float) -> None:
        """Start the timer at a random phase, so that members do not probe in step."""
        self._next_probe = now + self._rng.uniform(0, self._config.probe_interval_seconds)

    def next_due(self) -> float:
        """When `tick` next has something to do."""
        return min(self._next_probe, self._prober.next_due())

    def tick(self, now: float) -> list[SilenceFinding | SilentWitness]:
        """End what is due, probe the next member; returns who was found silent."""
        findings: list[SilenceFinding | SilentWitness] = []
        if self._prober.next_due() <= now:
            findings = self._judge_probes(now)
            for relay in self._prober.pop_relays(now=now):
                self._answer_relay(relay)
        self._probe_next(now)
        return findings

    def wake_up(self) -> None:
        """This process was frozen: what did not arrive meanwhile proves nothing."""
        self._prober.clear()

    def forget(self, target: str) -> None:
        """`target` is gone: its probes end without a finding."""
        self._prober.forget(target)

    def probe_now(self, target: str, now: float) -> None:
        """Probe `target` out of turn, afresh."""
        self._prober.forget(target)
        self._probe(target, now)

    def link_lost(self, peer: str) -> None:
        """Tell those who asked us to reach `peer` that we cannot."""
        for relay in self._prober.pop_relays(target=peer):
            self._answer_relay(relay)

    # -- our own probes --------------------------------------------------------------------

    def _probe_next(self, now: float) -> None:
        if now < self._next_probe:
            return
        interval = self._config.probe_interval_seconds * self.health.multiplier
        self._next_probe = max(self._next_probe + interval, now)
        target = self._prober.next_target(self._table.live_others())
        if target is not None and not self._prober.is_probing(target):
            self._probe(target, now)

    def _probe(self, target: str, now: float) -> None:
        due = now + self._config.probe_timeout_seconds * self.health.multiplier
        number = self._prober.start(target, now, due)
        if self._links.is_lost(target):
            self._ask_helpers(number, self._prober.probes[number])
        else:
            self._send(target, MembershipMessage(MembershipKind.PING, sequence=number))

    def ask_again(self, target: str, now: float) -> None:
        """Probe a suspect both ways at once: every helper that has a sign of life reports it."""
        number = self._prober.start(target, now, now)
        probe = self._prober.probes[number]
        probe.again = True
        if not self._links.is_lost(target):
            self._send(target, MembershipMessage(MembershipKind.PING, sequence=number))
        self._ask_helpers(number, probe, _WITNESSES_FACTOR * self._config.helpers)
        probe.due = now + self._config.probe_deadline_seconds

    def _ask_helpers(self, number: int, probe: Probe, most: int | None = None) -> None:
        others = [peer for peer in self._dissemination.reachable() if peer != probe.target]
        probe.helpers = tuple(self._dissemination.sample(others, most or self._config.helpers))
        probe.indirect = True
        probe.due = self._end_of(probe)
        claim = (self._dissemination.claim(self._table.records[probe.target]),)
        for helper in probe.helpers:
            self._send(
                helper, MembershipMessage(MembershipKind.REQUEST, claim, number, probe.target)
            )

    def _end_of(self, probe: Probe) -> float:
        """When it has failed. This device is given more time while it doubts itself."""
        return probe.started + self._config.probe_deadline_seconds * self.health.multiplier

    def _judge_probes(self, now: float) -> list[SilenceFinding | SilentWitness]:
        findings: list[SilenceFinding | SilentWitness] = []
        for number, probe in self._prober.due_probes(now):
            if self._links.last_flow(probe.target) >= probe.started:
                self._prober.end(number)  # it only has to wait behind data, there or back
                continue
            if probe.again:
                at = max(map(self._links.last_flow, probe.silent_helpers), default=-math.inf)
                findings.append(SilentWitness(probe.target, at))
                probe.due = self._end_of(probe)  # an answer still counts
                if probe.due <= now:
                    self._prober.end(number)
                continue
            if not probe.indirect:
                self._ask_helpers(number, probe)
                continue
            self._prober.end(number)
            if self._config.local_health:
                self.health.penalise(len(probe.silent_helpers))
            reason = f"it did not answer a probe within {now - probe.started:.1f} s"
            findings.append(SilenceFinding(probe.target, certain=False, reason=reason))
        return findings

    def on_ack(self, peer: str, sequence: int, now: float) -> tuple[str, float]:
        """A probe of ours, or one that we do for another, was answered: who is there, since when.

        `peer` itself, also where it answers late; through a helper it is whom we probed, who may
        have been there a deadline ago for the last time: its data has vouched for it.
        """
        relay = self._prober.relayed(sequence, peer)
        if relay is not None:
            self._send(relay.origin, MembershipMessage(MembershipKind.ACK, sequence=relay.sequence))
            return peer, now
        probe = self._prober.answered(sequence, peer)
        if probe is not None:
            self.health.reward()
        if probe is None or peer == probe.target:
            return peer, now
        return probe.target, now - self._config.probe_deadline_seconds

    def on_nack(self, peer: str, message: MembershipMessage) -> SilenceFinding | None:
        """A helper did not reach our target.

        Where our own link to the target has ended, and so have those of all helpers asked, its
        process must have ended: nothing else ends links that have nothing else in common.
        """
        probe = self._prober.probes.get(message.sequence)
        if probe is None or peer not in probe.helpers:
            return None
        probe.nacks.add(peer)
        if message.lost:
            probe.lost.add(peer)
        if not self._links.is_lost(probe.target) or probe.lost != set(probe.helpers):
            return None
        reason = f"its links to this device and to {len(probe.lost)} others ended"
        return SilenceFinding(probe.target, certain=True, reason=reason)

    # -- probes for others -----------------------------------------------------------------

    def on_request(
        self, peer: str, message: MembershipMessage, now: float, suspicion: Suspicion | None
    ) -> None:
        """Probe the target for `peer`, or say at once whether there are signs of it.

        Args:
            suspicion: of the target. Once it has lasted for a while our own probes are on their
                way there: on a cable that may be full more of them only take room.
        """
        target, config = message.target, self._config
        due = now + config.relay_timeout_seconds
        lately = now - config.probe_deadline_seconds
        vouches = self._links.last_flow(target) >= lately or (
            suspicion is not None
            and (
                suspicion.has_sign_since(lately, config.excuse_seconds)
                # of two suspects each is asked for every second half second
                or suspicion.lacked_witness_since(lately - config.probe_deadline_seconds)
            )
        )
        is_asked = (
            suspicion is not None
            and suspicion.is_probed
            and suspicion.seconds(now) > config.probe_deadline_seconds
        )
        if vouches or target == self._table.me.id:
            self._send(peer, MembershipMessage(MembershipKind.ACK, sequence=message.sequence))
        elif is_asked or self._links.is_lost(target):
            self._answer_relay(ProbeRelay(peer, message.sequence, target, due))
        elif target in self._table.records:
            number = self._prober.start_relay(peer, message.sequence, target, due)
            if number is not None:
                self._send(target, MembershipMessage(MembershipKind.PING, sequence=number))

    def _answer_relay(self, relay: ProbeRelay) -> None:
        lost = self._links.is_lost(relay.target)
        nack = MembershipMessage(MembershipKind.NACK, sequence=relay.sequence, lost=lost)
        self._send(relay.origin, nack)

    def _send(self, peer: str, message: MembershipMessage) -> None:
        self._dissemination.send(peer, message)


@dataclass(slots=True)
class LocalHealth:
    """The awareness score; 0 is healthy.

    Attributes:
        score_limit: highest score, so probes stretch to at most `score_limit + 1` times.
        late_tick_seconds: a tick later than this means the process was frozen.
        score: 0 to `score_limit`; changed by the methods below only.
    """

    score_limit: int
    late_tick_seconds: float
    score: int = 0

    @property
    def multiplier(self) -> int:
        """What probe intervals and probe timeouts are multiplied with."""
        return self.score + 1

    def frozen_seconds(self, due: float, now: float) -> float:
        """How long this process was frozen, given a tick due at `due`; 0 where it was not.

        Raises the score by one where it was.
        """
        late = now - due
        if late <= self.late_tick_seconds:
            return 0.0
        self.penalise(1)
        return late

    def penalise(self, points: int) -> None:
        """Count `points` pieces of evidence that this device is the slow one."""
        self.score = min(self.score_limit, self.score + points)

    def reward(self) -> None:
        """Count one probe answered in time."""
        self.score = max(0, self.score - 1)
