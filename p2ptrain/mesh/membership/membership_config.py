"""The constants of the membership protocol, each with unit, formula, cost of raising and lowering.

The home LAN preset promises (tools/simulate_mesh.py measures it): a frozen process or pulled cable
is declared dead 2.3 to 4.2 seconds after its last sign of life, a device frozen for up to two
seconds never is. The earliest verdict is

    probe_deadline + suspicion_least  =  0.5 s + 2.0 s,

2.27 s on a device whose clock runs 10 % fast: more than two seconds plus the way of a refutation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Knobs of one member; all members of a group should use the same.

    Attributes:
        probe_interval_seconds: one member is probed per interval, times the local health
            multiplier. A given member is probed once per interval on average, whatever
            the group's size. Raise: less traffic. Lower: silence is noticed sooner.
        probe_timeout_seconds: a direct probe unanswered for this long (times the multiplier) goes
            through helpers. Raise: fewer helpers bothered on slow networks. Lower: less left of
            the deadline is wasted on a broken direct path.
        probe_deadline_seconds: a probe unanswered for this long (times the multiplier) starts a
            suspicion. Raise: slower detection. Lower: busy devices are suspected needlessly,
            though they refute.
        relay_timeout_seconds: a helper answers "not reached" after this long. Must be below
            probe_deadline - probe_timeout, or no such answer ever counts.
        helpers: devices asked to probe in our place. Raise: more traffic per failed probe.
            Lower: one broken path between two devices starts suspicions.
        suspicion_least_seconds: least time to refute, times max(1, log10(members)). Raise: slower
            verdicts. Lower: a device frozen for two seconds is declared dead.
        suspicion_greatest_factor: unconfirmed suspicions wait this times the least. Raise: lone
            accusers harm less. Lower: verdicts in a half-frozen group come sooner.
        confirmations: further accusers after which the least timeout holds (fewer where the
            group is smaller). Raise: verdicts need more witnesses. Lower: they need fewer.
        evidence_seconds: where a third party reports the end of a process which sent data within
            this time over an open link, that only starts a suspicion. Nor is there a verdict for
            so long after much data came from a suspect, or an answer, however late; nor, where
            no answers come at all, after data from any: then this device's own cable is full.
            Must be below the earliest verdict, and above probe_deadline.
            Raise: true deaths spread slower. Lower: a confused member can have others declared
            dead until they refute, and a full slow link can cost a member its place.
        excuse_seconds: a suspect of whom anything comes, though no answer, is given
            `evidence_seconds` more each time, for so long in all: what was lost on a full cable
            TCP sends again after up to 6.2 s (0.2, 0.4, ... 3.2 s), and later messages wait
            for it. So is one that a silent member which sends data might still receive from, and
            one that a single member finds silent. Raise: a deaf device is found later.
            Lower: one whose cable becomes a hundred times slower while it is full loses its place.
        goodbye_seconds: what others say of a device that left counts for so long, until its link
            here ends too. Raise: a false goodbye is believed where a link breaks later by itself.
            Lower: where links end slowly, who left is taken for silent.
        return_seconds: for so long after it was away, what a member says of the end of others
            starts no more than a suspicion where there is a link to them: it was the one that
            received nothing. Raise: true deaths that it has found since spread slower. Lower: those
            whom it took for dead meanwhile are lost to a job until they refute.
        local_health: False switches off every rule of failure_detector.py (for tests that show
            what it is good for).
        late_tick_seconds: a tick later than this means this process was frozen. Raise: short
            freezes go unnoticed and may start accusations. Lower: ordinary scheduling delays
            count as freezes and make the device a timid observer.
        heartbeat_seconds: longest time between two ticks, the resolution of the line above.
            Raise: fewer wake-ups. Lower: freezes are measured more exactly.
        wake_grace_seconds: after a freeze no verdict for at least this long, so that what lies in
            the sockets is read first. Raise: slower verdicts after a freeze. Lower: a refutation
            may be read too late.
        health_score_limit: probes stretch to at most this plus one times. Raise: a device cut off
            from all takes longer to find that out. Lower: a struggling one accuses more.
        gossip_interval_seconds: changes travel at once, then to further members at this interval.
            Raise: slower agreement. Lower: more, smaller messages.
        gossip_fanout: members that get gossip per interval. Raise, lower: as above, reversed.
        eager_fanout: members that get at once what a device says of itself (a refutation,
            a leave). Raise: bursts in large groups. Lower: refutations take another hop.
        gossip_limit_factor: each member passes a change on to at most this times
            ceil(log2(members + 1)) others. Raise: more repetition. Lower: in large groups
            some member may be missed until the next sync.
        sync_interval_seconds: digests of the tables are compared with a random member this often,
            times max(1, members / 32); full tables follow only where they differ. Raise: what
            gossip missed stays missed longer. Lower: more traffic.
        reconnect_interval_seconds: one of the dead gets our table at this interval, so that
            two halves of a split network find each other. Raise: slower healing. Lower: traffic.
        remember_seconds: the dead and the departed stay listed this long. Raise: longer lists.
            Lower: late gossip may list a dead member as alive once more, until it is probed.
        table_limit: most members listed, dead ones included; the longest dead make room first.
            Raise: what a hostile member can make us remember. Lower: the largest group.
        message_limit_bytes: most CBOR bytes of one payload; larger news is paged. Must leave room
            for the frame's own fields in its 4096-byte header.
        relays_limit: probes done for others at one time. Raise: what a hostile member can make us
            remember. Lower: helpers refuse under load, which their askers take for slowness.
        incarnation_jump: a third party's claim may raise a known incarnation by at most this.
            Raise: poison lasts longer. Lower: a member that refuted often while out of sight
            is believed only from its own mouth.
        first_incarnation_limit: same, for a device that was unknown before.
    """

    probe_interval_seconds: float = 0.25
    probe_timeout_seconds: float = 0.2
    probe_deadline_seconds: float = 0.5
    relay_timeout_seconds: float = 0.2
    helpers: int = 3
    suspicion_least_seconds: float = 2.0
    suspicion_greatest_factor: float = 1.5
    confirmations: int = 2
    evidence_seconds: float = 2.0
    excuse_seconds: float = 8.0
    goodbye_seconds: float = 5.0
    return_seconds: float = 10.0
    local_health: bool = True
    late_tick_seconds: float = 0.1
    heartbeat_seconds: float = 0.1
    wake_grace_seconds: float = 0.3
    health_score_limit: int = 4
    gossip_interval_seconds: float = 0.1
    gossip_fanout: int = 3
    eager_fanout: int = 16
    gossip_limit_factor: int = 3
    sync_interval_seconds: float = 5.0
    reconnect_interval_seconds: float = 1.0
    remember_seconds: float = 600.0
    table_limit: int = 256
    message_limit_bytes: int = 3500
    relays_limit: int = 64
    incarnation_jump: int = 1000
    first_incarnation_limit: int = 1 << 20


HOME_LAN = MembershipConfig()
"""For 1 to some 30 devices on one LAN, Wi-Fi included; see the module's docstring."""
