"""Membership, rule by rule."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import (
    Leave,
    LinkTraffic,
    MemberRecord,
    MemberUpdated,
    MessageReceived,
    PeerLinkLost,
    PeerLinkUp,
    SelfChanged,
    SendTo,
    TrustChanged,
)
from p2ptrain.mesh.membership.core_messages import (
    Claim,
    MembershipKind,
    MembershipMessage,
    encode,
)
from p2ptrain.mesh.membership.membership import Membership
from p2ptrain.mesh.membership.membership_config import HOME_LAN
from tests.unit.mesh.membership.cluster import Cluster

ALIVE, SUSPECT, DEAD, LEFT = (
    MemberState.ALIVE,
    MemberState.SUSPECT,
    MemberState.DEAD,
    MemberState.LEFT,
)


def claim(id_: str, state: MemberState, incarnation: int = 1, instance: str = "") -> Claim:
    return Claim(MemberRecord(id_, f"device {id_}", incarnation, state, {}, instance))


def gossip(peer: str, *claims: Claim) -> MessageReceived:
    return MessageReceived(peer, encode(MembershipMessage(MembershipKind.GOSSIP, claims)))


# -- joining ------------------------------------------------------------------------------


def test_all_agree_on_a_newcomer_within_half_a_second() -> None:
    cluster = Cluster("abcdefgh")
    cluster.run_for(0.5)
    for observer in "abcdefgh":
        assert [cluster.state(observer, member) for member in "abcdefgh"] == [ALIVE] * 8


def test_a_newcomer_linked_to_one_member_only_learns_of_all() -> None:
    cluster = Cluster("abc")
    newcomer = Membership(MemberRecord("d", "device d"), HOME_LAN, Random(0))
    cluster.nodes["d"] = newcomer
    cluster.feed("d", PeerLinkUp("a"))
    cluster.feed("a", PeerLinkUp("d"))
    cluster.run_for(0.5)
    assert sorted(newcomer.members) == list("abcd")
    assert cluster.state("c", "d") is ALIVE


def test_a_restarted_device_replaces_its_predecessor_visibly() -> None:
    cluster = Cluster("abc")
    cluster.add("c")  # same incarnation, another process
    cluster.run_for(0.5)
    assert cluster.history("a", "c") == ["alive", "dead", "alive"]
    assert cluster.nodes["a"].members["c"].incarnation > 1


@pytest.mark.parametrize("gone", [DEAD, LEFT])
def test_news_of_a_restart_that_comes_before_the_device_itself_is_no_attack(
    gone: MemberState,
) -> None:
    """Its link is up and heard, but the first word of its new process comes from another."""
    member = Membership(MemberRecord("a", "device a"), HOME_LAN, Random(0))
    member.tick(0.0)
    member.handle(gossip("b", claim("b", ALIVE), claim("c", ALIVE, 1, "old")), 0.0)
    member.handle(gossip("b", claim("c", gone, 1, "old")), 0.1)
    member.handle(PeerLinkUp("c"), 0.2)
    out = member.handle(gossip("b", claim("c", ALIVE, 2, "new")), 0.2)
    states = [i.record.state for i in out if isinstance(i, MemberUpdated)]
    assert states == ([DEAD, ALIVE] if gone is DEAD else [ALIVE])  # now it is known to have ended


def test_a_description_spreads() -> None:
    cluster = Cluster("abc")
    cluster.feed("a", SelfChanged(name="a-2", info={"threads": 4}))
    cluster.run_for(0.3)
    record = cluster.nodes["c"].members["a"]
    assert (record.name, record.info) == ("a-2", {"threads": 4})
    assert cluster.history("c", "a") == ["alive", "alive"]


def test_a_description_out_of_bounds_is_refused() -> None:
    cluster = Cluster("a")
    with pytest.raises(ProtocolError):
        cluster.feed("a", SelfChanged(info={"story": "x" * 257}))
    assert cluster.nodes["a"].members["a"].info == {}


# -- silence ------------------------------------------------------------------------------


def last_goes_silent(ids: str, seconds: float = 0.0) -> Cluster:
    """Members that have known each other for a while; the last has been silent for `seconds`."""
    cluster = Cluster(ids)
    cluster.run_for(3.0)
    cluster.silent.add(ids[-1])
    cluster.run_for(seconds)
    return cluster


def test_a_silent_member_is_suspected_then_declared_dead() -> None:
    cluster = last_goes_silent("abcd", 2.3)
    assert cluster.state("a", "d") is SUSPECT
    cluster.run_for(1.9)
    assert [cluster.state(observer, "d") for observer in "abc"] == [DEAD] * 3
    assert cluster.history("a", "d") == ["alive", "suspect", "dead"]


def test_a_member_silent_for_two_seconds_refutes() -> None:
    cluster = last_goes_silent("abcd", 2.0)
    cluster.silent.clear()
    cluster.run_for(1.0)
    assert [cluster.state(observer, "d") for observer in "abc"] == [ALIVE] * 3
    assert "dead" not in cluster.history("a", "d")


def test_whose_data_keeps_coming_is_not_dead() -> None:
    """Its words, and ours, wait behind that data."""
    cluster = last_goes_silent("abcd")
    for _ in range(100):
        cluster.feed("a", LinkTraffic({"d": cluster.now - 0.05}))
        cluster.run_for(0.1)
    assert cluster.history("a", "d") == ["alive"]
    assert [cluster.state(observer, "d") for observer in "bc"] == [ALIVE] * 2  # a vouches for it
    cluster.run_for(4.2)
    assert [cluster.state(observer, "d") for observer in "abc"] == [DEAD] * 3


def test_data_from_a_suspect_puts_off_the_verdict_and_no_longer() -> None:
    cluster = last_goes_silent("abc", 2.3)
    assert cluster.state("a", "c") is SUSPECT
    last = cluster.now
    cluster.feed("a", LinkTraffic({"c": last}))
    cluster.feed("b", LinkTraffic({"c": last}))
    cluster.run_for(HOME_LAN.evidence_seconds - 0.05)
    assert cluster.state("a", "c") is SUSPECT
    cluster.run_for(0.1)
    assert [cluster.state(observer, "c") for observer in "ab"] == [DEAD] * 2


def answer(number: int) -> dict[str, object]:
    return encode(MembershipMessage(MembershipKind.ACK, sequence=number))


def test_an_answer_that_comes_late_puts_off_the_verdict_and_no_longer() -> None:
    """What contradicts the suspicion is on its way behind it."""
    cluster = last_goes_silent("abc", 2.3)
    for observer in "ab":
        assert cluster.state(observer, "c") is SUSPECT
        cluster.feed(observer, MessageReceived("c", answer(1)))
    cluster.run_for(HOME_LAN.evidence_seconds - 0.05)
    assert [cluster.state(observer, "c") for observer in "ab"] == [SUSPECT] * 2
    cluster.run_for(0.1)
    assert [cluster.state(observer, "c") for observer in "ab"] == [DEAD] * 2


def test_who_gets_data_vouches_for_a_suspect_too() -> None:
    """At b nothing comes but by way of the others; a has data from c again and again."""
    cluster = last_goes_silent("abc", 1.2)
    assert cluster.state("b", "c") is SUSPECT
    for _ in range(100):
        cluster.feed("a", LinkTraffic({"c": cluster.now - 0.05}))
        cluster.run_for(0.1)
    assert [cluster.state(observer, "c") for observer in "ab"] == [SUSPECT] * 2


def sign(peer: str, at: float) -> LinkTraffic:
    """Something came, though too little to be data."""
    return LinkTraffic({}, {peer: at})


@pytest.mark.parametrize("spoke", [True, False])
def test_signs_of_a_suspect_put_off_the_verdict_though_not_for_ever(spoke: bool) -> None:
    """It speaks, or packets of it wait for one that was lost, and it hears nobody."""
    cluster = last_goes_silent("abc", 1.2)
    assert cluster.state("a", "c") is SUSPECT
    for _ in range(14):
        cluster.run_for(0.5)
        for observer in "ab":
            word = MessageReceived("c", encode(MembershipMessage(MembershipKind.PING, sequence=7)))
            cluster.feed(observer, word if spoke else sign("c", cluster.now))
    assert [cluster.state(observer, "c") for observer in "ab"] == [SUSPECT] * 2
    for _ in range(4):
        cluster.run_for(0.5)
        for observer in "ab":
            cluster.feed(observer, sign("c", cluster.now))
    assert [cluster.state(observer, "c") for observer in "ab"] == [DEAD] * 2


def test_a_last_sign_puts_off_the_verdict_and_no_longer() -> None:
    cluster = last_goes_silent("abc", 2.3)
    for observer in "ab":
        cluster.feed(observer, sign("c", cluster.now))
    cluster.run_for(HOME_LAN.evidence_seconds - 0.05)
    assert cluster.state("a", "c") is SUSPECT
    cluster.run_for(0.1)
    assert [cluster.state(observer, "c") for observer in "ab"] == [DEAD] * 2


def test_who_gets_signs_vouches_for_a_suspect() -> None:
    """Only a gets any; the others ask it however seldom they probe otherwise."""
    cluster = last_goes_silent("abcd", 1.2)
    for _ in range(20):
        cluster.run_for(0.3)
        cluster.feed("a", sign("d", cluster.now - 0.1))
    assert [cluster.state(observer, "d") for observer in "abc"] == [SUSPECT] * 3
    cluster.run_for(4.2)
    assert [cluster.state(observer, "d") for observer in "abc"] == [DEAD] * 3


def two_go_silent(seconds: float = 0.0) -> Cluster:
    """Of five; the last but one gets the last one's data, and a its own."""
    cluster = last_goes_silent("abcde")
    cluster.silent.add("d")
    cluster.run_for(seconds)
    return cluster


def test_whose_neighbour_cannot_be_heard_has_time_to_be_though_not_for_ever() -> None:
    """Both cables are full: only d gets data from e, and nobody hears d say so."""
    cluster = two_go_silent()
    for _ in range(75):
        cluster.feed("a", LinkTraffic({"d": cluster.now - 0.05}))
        cluster.run_for(0.1)
    assert [cluster.state(observer, "e") for observer in "abc"] == [SUSPECT] * 3
    assert "dead" not in cluster.history("a", "d")
    for _ in range(40):
        cluster.feed("a", LinkTraffic({"d": cluster.now - 0.05}))
        cluster.run_for(0.1)
    assert [cluster.state(observer, "e") for observer in "abc"] == [DEAD] * 3


def test_a_neighbour_that_is_heard_no_more_either_puts_off_no_verdict() -> None:
    """Both froze: what came of d was sent before."""
    cluster = two_go_silent()
    cluster.feed("a", LinkTraffic({"d": cluster.now}))
    cluster.run_for(3.4)
    assert [cluster.state(observer, "e") for observer in "abc"] == [DEAD] * 3


def test_a_neighbour_that_answers_puts_off_no_verdict() -> None:
    """All get data from d, which says that it does not reach e."""
    cluster = last_goes_silent("abcde")
    for _ in range(34):
        cluster.feed("a", LinkTraffic({"d": cluster.now - 0.05}))
        cluster.run_for(0.1)
    assert [cluster.state(observer, "e") for observer in "abcd"] == [DEAD] * 4


def test_two_suspects_are_asked_for_in_turn() -> None:
    """Signs of the one that is judged second are needed before its time is over too."""
    cluster = Cluster("abcdefgh")
    cluster.run_for(3.0)
    member = cluster.nodes["a"]
    cluster.feed("a", gossip("b", claim("g", SUSPECT), claim("h", SUSPECT)), settle=False)
    asked: list[str] = []
    for _ in range(18):
        cluster.now += 0.1
        sent = [i for i in member.tick(cluster.now) if isinstance(i, SendTo) and i.peer == "c"]
        asked += [i.payload["target"] for i in sent if i.payload["kind"] == "req"]
    assert min(asked.count("g"), asked.count("h")) >= 2


def timid(cluster: Cluster, id_: str) -> Membership:
    """That member, after it was frozen again and again."""
    member = cluster.nodes[id_]
    while member.health_score < HOME_LAN.health_score_limit:
        cluster.now += 1.0
        member.tick(cluster.now)
    return member


def test_one_accuser_alone_is_doubted_by_those_who_hear_others() -> None:
    """Others would find the same by now; this device is too timid to find anything by itself."""
    cluster = Cluster("abcd")
    cluster.run_for(3.0)
    member = timid(cluster, "a")
    cluster.feed("a", gossip("c", Claim(claim("d", SUSPECT).record, ("c",))), settle=False)
    began = cluster.now
    while cluster.now < began + 3.3:  # of 3 s without a second accuser
        cluster.now += 0.1
        out = member.tick(cluster.now)
        words = [i.payload for i in out if isinstance(i, SendTo) and i.peer == "b"]
        asked = [w["sequence"] for w in words if w["kind"] == "req" and cluster.now < began + 1.2]
        for number in asked or [0]:  # at first b still reaches d
            member.handle(MessageReceived("b", answer(number)), cluster.now)
    assert cluster.state("a", "d") is SUSPECT


def test_a_suspect_is_asked_for_again_through_the_others_however_timid_this_device_is() -> None:
    cluster = Cluster("abcdefgh")
    cluster.run_for(3.0)
    member = timid(cluster, "a")
    cluster.feed("a", gossip("b", claim("h", SUSPECT, 1)), settle=False)
    asked: list[set[str]] = []
    for _ in range(18):  # of which nobody answers any
        cluster.now += 0.1
        out = member.tick(cluster.now)
        requests = [i for i in out if isinstance(i, SendTo) and i.payload["kind"] == "req"]
        asked.append({i.peer for i in requests if i.payload["target"] == "h"})
    assert asked.count(set("bcdefg")) >= 3


def test_a_suspect_is_not_probed_for_others_too() -> None:
    """On a cable that may be full one probe of each member is enough."""
    cluster = last_goes_silent("abc", 1.3)
    member = cluster.nodes["a"]
    assert cluster.state("a", "c") is SUSPECT
    claims = (claim("c", SUSPECT),)
    request = encode(MembershipMessage(MembershipKind.REQUEST, claims, sequence=99, target="c"))
    out = member.handle(MessageReceived("b", request), cluster.now)
    assert [(i.peer, i.payload["kind"]) for i in out if isinstance(i, SendTo)] == [("b", "nack")]


def test_a_lone_accuser_waits_for_others_that_are_heard_seldom() -> None:
    """On its full cable a word that was lost twice comes seconds later."""
    cluster = Cluster("abcd")
    cluster.run_for(3.0)
    member = cluster.nodes["a"]
    member.handle(PeerLinkLost("d"), cluster.now)
    for number in range(150):
        cluster.now += 0.05
        if number % 70 == 30:  # 3.5 s lie between two
            word = MessageReceived(
                "b", encode(MembershipMessage(MembershipKind.PING, sequence=number))
            )
            member.handle(word, cluster.now)
        member.tick(cluster.now)
    assert cluster.state("a", "d") is SUSPECT


def test_a_lone_accuser_waits_while_others_are_heard() -> None:
    """They would find so too: it is its own cable that is full."""
    cluster = Cluster("abcd")
    cluster.run_for(3.0)
    member = cluster.nodes["a"]
    member.handle(PeerLinkLost("d"), cluster.now)  # nobody hears of it
    for number in range(1000):
        cluster.now += 0.05
        if number % 10 == 0:
            word = MessageReceived(
                "b", encode(MembershipMessage(MembershipKind.PING, sequence=number))
            )
            member.handle(word, cluster.now)
        member.tick(cluster.now)
        if cluster.state("a", "d") is DEAD:
            break
    waited = 0.05 * (number + 1)
    assert waited == pytest.approx(HOME_LAN.excuse_seconds, abs=0.2)


def test_chatter_of_others_keeps_no_device_alive() -> None:
    """What they say of a frozen device adds up to data, also where all had suspected each other."""
    cluster = Cluster("abcd")
    cluster.run_for(3.0)
    for observer, peer in zip("abc", "bca", strict=True):
        cluster.feed(observer, gossip(peer, claim(observer, SUSPECT)))
    cluster.silent.add("d")
    for _ in range(42):
        cluster.run_for(0.1)
        for observer in "abc":
            others = {peer: cluster.now for peer in "abc" if peer != observer}
            cluster.feed(observer, LinkTraffic(others, others))
    assert [cluster.state(observer, "d") for observer in "abc"] == [DEAD] * 3


def test_a_device_with_a_full_cable_declares_no_device_dead() -> None:
    """Data comes from b alone, and no answer from anybody: they wait behind it."""
    cluster = Cluster("abcd")
    cluster.run_for(3.0)
    cluster.silent |= set("bcd")
    for _ in range(80):
        cluster.feed("a", LinkTraffic({"b": cluster.now - 0.05}))
        cluster.run_for(0.1)
    assert [cluster.state("a", member) for member in "bcd"] == [ALIVE, SUSPECT, SUSPECT]
    cluster.run_for(8.0)  # it doubts itself by now, and probes seldom
    assert [cluster.state("a", member) for member in "bcd"] == [DEAD] * 3


def test_data_read_after_a_freeze_of_our_own_says_nothing() -> None:
    cluster = last_goes_silent("abc", 2.3)
    cluster.now += 2.0  # a and b were frozen
    for observer in "ab":
        cluster.feed(observer, LinkTraffic({"c": cluster.now}))
    cluster.run_for(1.9)
    assert [cluster.state(observer, "c") for observer in "ab"] == [DEAD] * 2


def test_a_frozen_device_wakes_up_without_accusing() -> None:
    cluster = Cluster("abc")
    cluster.run_for(3.0)
    cluster.now += 2.0  # everybody was frozen: probes under way were never answered
    before = len(cluster.changes)
    cluster.feed("a", SelfChanged(), settle=False)
    assert cluster.nodes["a"].health_score == 1
    cluster.run_for(0.4)
    assert cluster.changes[before + 1 :] == []


def test_a_suspicion_does_not_run_while_its_holder_is_frozen() -> None:
    member = Membership(MemberRecord("a", "device a"), HOME_LAN, Random(0))
    member.tick(0.0)
    member.handle(gossip("b", claim("b", ALIVE)), 0.0)
    member.handle(gossip("c", claim("b", SUSPECT)), 0.0)
    out = member.tick(30.0)
    assert not [i for i in out if isinstance(i, MemberUpdated)]
    assert member.members["b"].state is SUSPECT


def test_a_broken_path_between_two_devices_starts_no_suspicion() -> None:
    cluster = Cluster("abc")
    cluster.run_for(1.0)
    original = cluster.nodes["a"].handle

    def deaf_to_b(event: object, now: float) -> list[object]:
        if isinstance(event, MessageReceived) and event.peer == "b":
            return []
        return original(event, now)  # type: ignore[arg-type, return-value]

    cluster.nodes["a"].handle = deaf_to_b  # type: ignore[method-assign, assignment]
    cluster.run_for(5.0)
    assert cluster.history("a", "b") == ["alive"]


# -- links --------------------------------------------------------------------------------


def test_a_refused_redial_is_a_death() -> None:
    cluster = Cluster("ab")
    out = cluster.feed("a", PeerLinkLost("b", refused=True))
    changes = [i for i in out if isinstance(i, MemberUpdated)]
    assert [(change.record.state, change.record.certain) for change in changes] == [(DEAD, True)]
    assert "process ended" in changes[0].reason


def test_links_lost_by_all_are_a_death() -> None:
    cluster = Cluster("abcd")
    cluster.silent.add("d")
    cluster.lose_links("d", refused=False)
    assert [cluster.state(observer, "d") for observer in "abc"] == [DEAD] * 3
    assert not cluster.nodes["a"].members["d"].certain  # it may have lost its network


def test_a_silent_death_becomes_certain_by_a_refused_redial_and_all_hear_of_it() -> None:
    cluster = Cluster("abcd")
    cluster.silent.add("d")
    cluster.run_for(5.0)
    assert [cluster.nodes[observer].members["d"].certain for observer in "abc"] == [False] * 3
    cluster.feed("a", PeerLinkLost("d"))
    cluster.feed("a", PeerLinkLost("d", refused=True))
    cluster.run_for(0.5)
    for observer in "abc":
        told = [(c.record.state, c.record.certain) for by, c in cluster.changes if by == observer]
        assert told[-2:] == [(DEAD, False), (DEAD, True)]
    cluster.feed("a", PeerLinkLost("d", refused=True))
    assert sum(by == "a" and c.record.certain for by, c in cluster.changes) == 1


def test_a_new_process_makes_the_silent_death_of_the_old_one_certain() -> None:
    cluster = Cluster("abc")
    cluster.silent.add("c")
    cluster.run_for(5.0)
    cluster.silent.clear()
    cluster.add("c")
    told = [c.record for by, c in cluster.changes if by == "a" and c.record.id == "c"]
    assert [(r.state, r.certain) for r in told[-3:]] == [
        (DEAD, False),
        (DEAD, True),
        (ALIVE, False),
    ]


def test_a_silent_device_that_is_heard_again_never_ended() -> None:
    cluster = Cluster("abc")
    cluster.silent.add("c")
    cluster.run_for(5.0)
    cluster.silent.clear()
    cluster.run_for(5.0)
    assert cluster.state("a", "c") is ALIVE
    assert not any(change.record.certain for _, change in cluster.changes)


def test_a_link_lost_by_one_only_is_refuted_through_the_others() -> None:
    cluster = Cluster("abc")
    cluster.feed("a", PeerLinkLost("c"))
    cluster.run_for(0.3)
    assert cluster.history("a", "c") == ["alive", "suspect", "alive"]


def test_a_lone_observer_waits_for_the_redial() -> None:
    cluster = Cluster("ab")
    cluster.silent.add("b")
    cluster.feed("a", PeerLinkLost("b"))
    assert cluster.state("a", "b") is SUSPECT
    cluster.run_for(1.5)
    assert cluster.state("a", "b") is SUSPECT
    cluster.run_for(1.0)
    assert cluster.state("a", "b") is DEAD


# -- leaving, returning, forgetting --------------------------------------------------------


def test_who_leaves_has_left_and_does_not_die() -> None:
    cluster = Cluster("abcd")
    cluster.feed("d", Leave())
    cluster.lose_links("d", refused=True)
    assert [cluster.state(observer, "d") for observer in "abc"] == [LEFT] * 3
    assert cluster.nodes["d"].next_wakeup == float("inf")
    assert cluster.feed("d", gossip("a", claim("d", DEAD, 9))) == []


def test_the_dead_return_in_a_higher_incarnation() -> None:
    cluster = Cluster("abc")
    cluster.lose_links("c", refused=True)
    died = cluster.nodes["a"].members["c"].incarnation
    cluster.add("c")
    assert cluster.state("a", "c") is ALIVE
    assert cluster.nodes["a"].members["c"].incarnation > died


def test_late_news_does_not_raise_the_dead() -> None:
    cluster = Cluster("abc")
    record = cluster.nodes["a"].members["c"]
    cluster.silent.add("c")
    cluster.lose_links("c", refused=True)
    cluster.feed("a", gossip("b", Claim(record)))
    assert cluster.state("a", "c") is DEAD


def test_the_dead_are_forgotten_after_ten_minutes() -> None:
    cluster = Cluster("ab")
    cluster.silent.add("b")
    cluster.lose_links("b", refused=True)
    cluster.run_for(599.0)
    assert cluster.state("a", "b") is DEAD
    cluster.run_for(2.0)
    assert cluster.state("a", "b") is None


def test_two_halves_find_each_other_again() -> None:
    cluster = Cluster("ab")
    cluster.silent.add("b")
    cluster.run_for(6.0)
    assert cluster.state("a", "b") is DEAD
    cluster.silent.clear()
    cluster.run_for(2.5)
    assert cluster.state("a", "b") is ALIVE


# -- poison -------------------------------------------------------------------------------


def test_a_false_death_is_doubted_by_those_who_hear_the_victim() -> None:
    cluster = Cluster("abc")
    cluster.run_for(1.0)
    cluster.feed("a", gossip("b", claim("c", DEAD, 5)), settle=False)
    assert cluster.state("a", "c") is SUSPECT
    cluster.run_for(0.5)
    assert cluster.history("a", "c") == ["alive", "suspect", "alive"]


def test_a_device_that_was_away_declares_no_device_dead() -> None:
    """It heard nobody; whom it took for dead has not been heard here for a while either."""
    cluster = Cluster("abc")
    cluster.run_for(1.0)
    cluster.silent.add("b")
    cluster.run_for(6.0)
    assert cluster.state("a", "b") is DEAD
    away = {cluster.nodes[observer].members["b"].incarnation for observer in "ac"}
    cluster.silent = {"c"}
    cluster.run_for(HOME_LAN.evidence_seconds + 0.1)  # silent, and not suspect for long enough
    back = claim("b", ALIVE, max(away) + 1)
    cluster.feed("a", gossip("b", back, claim("c", DEAD, 9)), settle=False)
    assert cluster.state("a", "b") is ALIVE
    assert cluster.state("a", "c") is SUSPECT


def test_who_has_been_back_for_long_is_believed() -> None:
    cluster = Cluster("abc")
    cluster.run_for(1.0)
    cluster.silent.add("b")
    cluster.run_for(6.0)
    cluster.silent.clear()
    cluster.run_for(HOME_LAN.return_seconds + 3.0)
    cluster.silent = {"c"}
    cluster.run_for(HOME_LAN.evidence_seconds + 0.1)
    assert cluster.state("a", "c") is not DEAD
    cluster.feed("a", gossip("b", claim("c", DEAD, 9)), settle=False)
    assert cluster.state("a", "c") is DEAD


@pytest.mark.parametrize("trusted", [None, frozenset("ab"), frozenset("b")])
def test_a_false_death_about_me_is_refuted(trusted: frozenset[str] | None) -> None:
    """Also where the set of trusted devices, as a store gives it, is of the others only."""
    cluster = Cluster("ab")
    cluster.feed("a", TrustChanged(trusted))
    cluster.feed("a", gossip("b", claim("a", DEAD, 7)))
    assert cluster.nodes["a"].members["a"].incarnation == 8
    assert cluster.nodes["b"].members["a"].incarnation == 8
    assert cluster.state("b", "a") is ALIVE


@pytest.mark.parametrize("incarnation", [(1 << 64) - 1, 1 << 49, -1])
def test_impossible_incarnations_are_a_protocol_error(incarnation: int) -> None:
    cluster = Cluster("ab")
    with pytest.raises(ProtocolError):
        cluster.feed("a", gossip("b", claim("b", ALIVE, incarnation)))


def test_a_leap_reported_by_a_third_party_is_refused() -> None:
    cluster = Cluster("abc")
    cluster.feed("a", gossip("b", claim("c", DEAD, 5000), claim("a", DEAD, 1 << 40)))
    assert cluster.state("a", "c") is ALIVE
    assert cluster.nodes["a"].members["a"].incarnation == 1
    assert cluster.nodes["a"].refused_claims == 2


def test_strangers_are_never_listed() -> None:
    cluster = Cluster("ab")
    cluster.feed("a", TrustChanged(frozenset("ab")))
    cluster.feed("a", gossip("b", *(claim(f"ghost{n}", ALIVE) for n in range(40))))
    cluster.feed("a", gossip("x", claim("x", ALIVE)))
    assert sorted(cluster.nodes["a"].members) == ["a", "b"]


def test_the_table_is_bounded() -> None:
    member = Membership(MemberRecord("a", "device a"), HOME_LAN, Random(0))
    for page in range(20):
        ghosts = (claim(f"ghost{page}-{n}", ALIVE) for n in range(50))
        member.handle(gossip("b", *ghosts), 0.0)
    assert len(member.members) == HOME_LAN.table_limit
    assert member.refused_claims > 0


def test_the_longest_dead_make_room() -> None:
    member = Membership(MemberRecord("a", "device a"), HOME_LAN, Random(0))
    member.handle(gossip("b", claim("old", DEAD)), 0.0)
    for number in range(300):
        member.handle(gossip("b", claim(f"n{number}", ALIVE)), 0.01)
    assert "old" not in member.members
    assert len(member.members) == HOME_LAN.table_limit


def test_messages_stay_small_however_many_members() -> None:
    cluster = Cluster("ab")
    info = {f"key{n}": "x" * 90 for n in range(9)}
    for number in range(100):
        record = MemberRecord(f"m{number:03}" * 16, f"device {number}", info=info)
        cluster.feed("a", gossip("b", Claim(record)))
    cluster.add("c")
    assert len(cluster.nodes["c"].members) == 103
    assert cluster.largest_message_bytes <= 3500


def test_a_device_no_longer_paired_is_gone_at_once() -> None:
    cluster = Cluster("abc")
    out = cluster.feed("a", TrustChanged(frozenset("ab")))
    (change,) = [i for i in out if isinstance(i, MemberUpdated)]
    assert (change.record.id, change.record.state) == ("c", DEAD)
    assert "c" not in cluster.nodes["a"].members
    cluster.feed("a", gossip("b", claim("c", ALIVE, 3)))
    assert "c" not in cluster.nodes["a"].members


# -- load ---------------------------------------------------------------------------------


def test_the_load_per_member_does_not_grow_with_the_group() -> None:
    def sent_per_second(count: int) -> float:
        config = dataclasses.replace(HOME_LAN, table_limit=4096)
        member = Membership(MemberRecord("a", "device a"), config, Random(0))
        peers = [f"m{number}" for number in range(count)]
        for first in range(0, count, 50):
            page = (claim(peer, ALIVE) for peer in peers[first : first + 50])
            member.handle(gossip("m0", *page), 0.0)
        now, sent = 0.0, 0
        while now < 40.0:
            now = member.next_wakeup
            outbox = [i for i in member.tick(now) if isinstance(i, SendTo)]
            while outbox:
                message = outbox.pop()
                sent += now >= 30.0
                if message.payload["kind"] == "ping":
                    number = message.payload["sequence"]
                    ack = encode(MembershipMessage(MembershipKind.ACK, sequence=number))
                    answer = member.handle(MessageReceived(message.peer, ack), now)
                    outbox += [i for i in answer if isinstance(i, SendTo)]
        return sent / 10.0

    assert sent_per_second(400) <= 1.2 * sent_per_second(10)


def test_a_rumour_that_a_process_was_replaced_is_doubted_once_only() -> None:
    cluster = Cluster("abc")
    cluster.silent.add("c")  # heard a moment ago, so hearsay is doubted, but it cannot answer
    cluster.feed("a", gossip("b", claim("c", ALIVE, 5, "new")), settle=False)
    assert cluster.state("a", "c") is SUSPECT
    cluster.feed("a", gossip("b", claim("c", ALIVE, 6, "new")), settle=False)
    assert cluster.nodes["a"].members["c"].instance == "new"
    assert cluster.history("a", "c") == ["alive", "suspect", "dead", "alive"]


def test_answers_to_old_news_do_not_beget_answers() -> None:
    cluster = Cluster("ab")
    cluster.feed("a", SelfChanged(name="a-2"))
    stale = gossip("b", claim("a", SUSPECT, 1))
    sent = [len(cluster.feed("a", stale, settle=False)) for _ in range(50)]
    assert sum(sent) == 1
    cluster.now += 0.1
    assert len(cluster.feed("a", stale, settle=False)) == 1
