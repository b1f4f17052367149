"""The election, rule by rule."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.election.election import Election
from p2ptrain.mesh.election.terms import ClaimVerdict, CoordinatorClaim, ElectionConfig, judge
from p2ptrain.mesh.membership.core_events import (
    CoordinatorIs,
    CoordinatorLost,
    ElectionInstruction,
    Instruction,
    MembersChanged,
    MessageReceived,
    Misbehaved,
    SendTo,
)
from p2ptrain.mesh.membership.core_messages import ElectionKind, ElectionMessage, decode, encode
from tests.support.thorough import examples_of
from tests.unit.mesh.cores import Cores


class Voters(Cores[Election]):
    """Elections joined without delay; `views` says whom each believes alive."""

    def __init__(self, *groups: str, floors: dict[str, int] | None = None) -> None:
        super().__init__(50.0)
        self.views: dict[str, frozenset[str]] = {}
        self.said: dict[str, list[CoordinatorIs | CoordinatorLost]] = {}
        self.sent: list[tuple[str, str, ElectionMessage]] = []
        for group in groups:
            for id_ in group:
                self.start(id_, (floors or {}).get(id_, 0))
            self.meet(group)

    def start(self, id_: str, floor: int = 0) -> None:
        """Start a process of `id_`, alone so far."""
        self.nodes[id_] = Election(id_, ElectionConfig(), Random(f"voter {id_}"), floor)
        self.said[id_] = []
        self.view(id_, frozenset(id_))

    def meet(self, group: str) -> None:
        """Everybody in `group` believes exactly `group` alive."""
        for id_ in group:
            self.view(id_, frozenset(group))
        self.settle()

    def view(self, id_: str, alive: frozenset[str]) -> None:
        self.views[id_] = alive
        self.carry_out(id_, self.nodes[id_].handle(MembersChanged(alive), self.now))

    def deliver(self, sender: str, receiver: str, message: ElectionMessage) -> None:
        """Hand one message over by itself."""
        event = MessageReceived(sender, encode(message))
        self.carry_out(receiver, self.nodes[receiver].handle(event, self.now))

    def are_linked(self, sender: str, receiver: str) -> bool:
        """Where both believe so."""
        return receiver in self.views[sender] and sender in self.views[receiver]

    def exclude(self, id_: str, device: str, seconds: float) -> None:
        """As `id_` sees it."""
        out = self.nodes[id_].exclude(device, self.now + seconds, self.now)
        self.carry_out(id_, out)
        self.settle()

    def coordinators(self, group: str) -> set[tuple[str, int] | None]:
        """Who is followed in `group`."""
        return {self.nodes[id_].coordinator for id_ in group}

    def agreed(self, group: str) -> tuple[str, int]:
        """The one coordinator of `group`."""
        (coordinator,) = self.coordinators(group)
        assert coordinator is not None
        return coordinator

    def note(self, id_: str, instruction: Instruction | ElectionInstruction) -> None:
        if isinstance(instruction, SendTo):
            self.sent.append((id_, instruction.peer, decode(ElectionMessage, instruction.payload)))
        elif isinstance(instruction, CoordinatorIs | CoordinatorLost):
            self.said[id_].append(instruction)


# -- electing -----------------------------------------------------------------------------


def test_a_lone_device_elects_itself_at_once() -> None:
    node = Election("a", ElectionConfig(), Random(0), term_floor=6)
    (said,) = node.handle(MembersChanged(frozenset("a")), 0.0)
    assert said == CoordinatorIs("a", 7, "elected by 1 of 1 devices")
    assert node.coordinator == ("a", 7)


def test_devices_that_start_together_agree_within_a_second() -> None:
    voters = Voters("bdac")
    voters.run_for(1.0)
    coordinator, term = voters.agreed("abcd")
    assert coordinator in "abcd"
    assert term <= 2


def test_the_survivors_elect_another_in_a_higher_term() -> None:
    voters = Voters("abcd")
    voters.silent.add("a")
    voters.meet("bcd")
    assert voters.coordinators("bcd") == {None}
    voters.run_for(1.0)
    coordinator, term = voters.agreed("bcd")
    assert coordinator in "bcd"
    assert term == 2


def test_no_device_is_elected_without_a_majority() -> None:
    voters = Voters("abcd")
    voters.silent |= {"a", "c", "d"}  # "b" believes "c" and "d" alive, but they are silent
    voters.meet("bcd")
    voters.run_for(5.0)
    assert voters.nodes["b"].coordinator is None
    assert voters.nodes["b"].term == 1, "polls without majority must not raise the term"


def test_a_majority_of_those_alive_is_enough_when_others_die_meanwhile() -> None:
    voters = Voters("abcd")
    voters.silent |= {"a", "c", "d"}
    voters.meet("bcd")
    voters.run_for(1.0)
    voters.meet("b")
    voters.run_for(0.1)
    assert voters.nodes["b"].coordinator == ("b", 2)


def test_a_device_votes_once_per_term() -> None:
    voters = Voters("abcd")
    voters.meet("bcd")
    voters.deliver("b", "d", ElectionMessage(ElectionKind.VOTE, 5))
    voters.deliver("c", "d", ElectionMessage(ElectionKind.VOTE, 5))
    voters.deliver("b", "d", ElectionMessage(ElectionKind.VOTE, 5))
    replies = [
        (peer, message.yes)
        for by, peer, message in voters.sent
        if by == "d" and message.kind is ElectionKind.REPLY
    ]
    assert replies == [("b", True), ("c", False), ("b", True)]


def test_a_restarted_device_does_not_vote_at_or_below_its_floor() -> None:
    voters = Voters("abc")
    voters.start("c", floor=5)
    voters.view("c", frozenset("bc"))
    voters.deliver("b", "c", ElectionMessage(ElectionKind.VOTE, 5))
    assert voters.sent[-1][2].yes is False


def test_who_is_not_believed_alive_gets_no_vote() -> None:
    voters = Voters("ab")
    voters.meet("b")
    voters.deliver("z", "b", ElectionMessage(ElectionKind.VOTE, 9))
    assert next(m.yes for _, peer, m in voters.sent if peer == "z") is False


# -- staying ------------------------------------------------------------------------------


def test_no_election_while_the_coordinator_lives() -> None:
    voters = Voters("abcde")
    voters.run_for(60.0)
    assert voters.agreed("abcde") == ("a", 1)
    assert all(len(said) <= 2 for said in voters.said.values())


def test_voters_with_a_living_coordinator_refuse() -> None:
    voters = Voters("abc")
    voters.deliver("c", "b", ElectionMessage(ElectionKind.VOTE, 9))
    assert voters.nodes["b"].coordinator == ("a", 1)
    assert voters.nodes["b"].term == 1


@pytest.mark.parametrize("floor", [0, 30])
def test_a_newcomer_does_not_depose_the_coordinator(floor: int) -> None:
    voters = Voters("bcd")
    voters.start("a", floor)
    voters.meet("abcd")
    voters.run_for(1.0)
    coordinator, term = voters.agreed("abcd")
    assert coordinator == "b"
    assert term >= floor


def test_a_latecomer_learns_the_coordinator_within_a_second() -> None:
    voters = Voters("abc")
    voters.nodes["d"] = Election("d", ElectionConfig(), Random(0))
    voters.said["d"] = []
    voters.meet("abcd")
    voters.run_for(1.0)
    assert voters.agreed("abcd") == ("a", 1)


# -- meeting again ------------------------------------------------------------------------


def test_a_thawed_coordinator_steps_down() -> None:
    voters = Voters("abcd")
    voters.silent.add("a")
    voters.meet("bcd")
    voters.run_for(30.0)
    successor = voters.agreed("bcd")
    voters.silent.clear()
    voters.meet("abcd")
    voters.run_for(0.5)
    assert voters.agreed("abcd") == successor


def test_a_thawed_coordinator_of_two_steps_down() -> None:
    voters = Voters("ab")
    voters.silent.add("a")
    voters.meet("b")
    voters.run_for(30.0)
    assert voters.nodes["b"].coordinator == ("b", 2)
    voters.silent.clear()
    voters.meet("ab")
    voters.run_for(0.5)
    assert voters.agreed("ab") == ("b", 2)


def test_of_two_groups_the_higher_term_stays() -> None:
    voters = Voters("abc", "def", floors={"d": 7, "e": 7, "f": 7})
    higher = voters.agreed("def")
    voters.meet("abcdef")
    voters.run_for(2.0)
    assert voters.agreed("abcdef") == higher


def test_two_groups_of_one_term_agree_in_a_higher_one() -> None:
    voters = Voters("abc", "def")
    assert (voters.agreed("abc"), voters.agreed("def")) == (("a", 1), ("d", 1))
    voters.meet("abcdef")
    voters.run_for(2.0)
    assert voters.agreed("abcdef") == ("a", 2)


def test_a_coordinator_that_restarts_without_memory_is_elected_again() -> None:
    voters = Voters("abc", floors={"a": 3, "b": 3, "c": 3})
    assert voters.agreed("abc") == ("a", 4)
    voters.start("a")
    voters.meet("abc")
    voters.run_for(2.0)
    assert voters.agreed("abc")[1] > 4


@settings(max_examples=examples_of(8), deadline=None)
@given(
    st.permutations("abcdefgh"),
    st.integers(1, 7),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_any_two_groups_agree_within_two_seconds(
    order: list[str], cut: int, floors: list[int]
) -> None:
    groups = "".join(order[:cut]), "".join(order[cut:])
    voters = Voters(*groups, floors=dict(zip("abcdefgh", floors, strict=True)))
    voters.run_for(3.0)
    before = {group: voters.agreed(group) for group in groups}
    voters.meet("abcdefgh")
    voters.run_for(2.0)
    coordinator, term = voters.agreed("abcdefgh")
    assert term >= max(term for _, term in before.values())
    assert coordinator in {id_ for id_, _ in before.values()}


# -- messages -----------------------------------------------------------------------------


def test_a_claim_counts_only_from_the_claimant() -> None:
    voters = Voters("abc")
    hint = ElectionMessage(ElectionKind.STALE, 9, leader="c")
    voters.deliver("b", "c", hint)
    assert voters.nodes["c"].coordinator == ("a", 1)


@pytest.mark.parametrize(
    "lie",
    [
        ElectionMessage(ElectionKind.ANNOUNCE, 1 << 50, support=3),
        ElectionMessage(ElectionKind.STALE, 1 << 20),
        ElectionMessage(ElectionKind.STALE, 1 << 53, leader="b"),
        ElectionMessage(ElectionKind.REPLY, 2, seen=1 << 53),
        ElectionMessage(ElectionKind.POLL, 1 << 20),
        ElectionMessage(ElectionKind.VOTE, 1 << 20),
        ElectionMessage(ElectionKind.FOLLOW, 1 << 30),
    ],
)
def test_an_absurd_term_is_ignored(lie: ElectionMessage) -> None:
    voters = Voters("abc")
    for _ in range(5):
        voters.deliver("b", "c", lie)
    assert voters.offences == [("c", Misbehaved("b", Offence.ABSURD_TERM))] * 5
    voters.run_for(2.0)
    assert voters.agreed("abc") == ("a", 1)
    assert [node.term for node in voters.nodes.values()] == [1, 1, 1]


@pytest.mark.parametrize("kind", [ElectionKind.STALE, ElectionKind.REPLY])
def test_hearsay_raises_no_term(kind: ElectionKind) -> None:
    voters = Voters("abc")
    for term in range(2, 2000, 7):
        voters.deliver("b", "c", ElectionMessage(kind, term, seen=term))
    assert voters.nodes["c"].term == 1


def test_terms_are_bounded_in_sum_by_time() -> None:
    """A member that is voted for has them rise; not further than elections can in that time."""
    config = ElectionConfig()
    node = Election("a", config, Random(0))
    node.handle(MembersChanged(frozenset("abc")), 0.0)
    term = 0
    for moment in range(8_000):
        term += 500
        vote = ElectionMessage(ElectionKind.VOTE, min(term, node.term + 500))
        node.handle(MessageReceived("b", encode(vote)), moment * 0.001)
    most = config.term_jump + 8.0 * config.term_rise_per_second
    assert most - 500 < node.term <= most + 500


@pytest.mark.parametrize("poisoned", ["a", "c", "bc", "ac"])
def test_an_absurd_own_term_heals_when_the_others_are_met(poisoned: str) -> None:
    """As from a damaged folder; of two halves the higher one comes down."""
    absurd = 1 << 22
    honest = "".join(sorted(set("abcd") - set(poisoned)))
    voters = Voters(honest, floors=dict.fromkeys(honest, 6))
    for id_ in poisoned:
        voters.start(id_, absurd + ord(id_))
    voters.meet("abcd")
    voters.run_for(2.0)
    coordinator, term = voters.agreed("abcd")
    assert coordinator in "abcd"
    assert 7 <= term < 12
    assert all(node.term == term for node in voters.nodes.values())


@pytest.mark.parametrize("poisoned", ["a", "b", "ab"])
def test_two_devices_with_absurd_terms_find_each_other(poisoned: str) -> None:
    voters = Voters("a", "b", floors={id_: 1 << 30 | ord(id_) for id_ in poisoned})
    voters.meet("ab")
    voters.run_for(2.0)
    voters.agreed("ab")


def test_a_newcomer_takes_the_term_of_a_household_that_is_far_ahead() -> None:
    voters = Voters("abc", floors=dict.fromkeys("abc", 1 << 22))
    voters.start("d", 3)
    voters.meet("abcd")
    voters.run_for(2.0)
    assert voters.agreed("abcd") == ("a", (1 << 22) + 1)


def test_one_liar_cannot_talk_a_device_out_of_its_term() -> None:
    voters = Voters("abc", floors=dict.fromkeys("abc", 9000))
    voters.deliver("b", "c", ElectionMessage(ElectionKind.STALE, 0, leader="b"))
    voters.run_for(2.0)
    assert voters.agreed("abc") == ("a", 9001)


def test_a_group_that_its_coordinator_made_up_is_not_followed() -> None:
    voters = Voters("abcd")
    voters.run_for(1.0)
    for _ in range(30):
        term = voters.nodes["c"].term + 1
        lie = ElectionMessage(ElectionKind.ANNOUNCE, term, support=1000)
        for id_ in "abc":
            voters.deliver("d", id_, lie)
        voters.run_for(0.1)
    assert {c[0] for c in voters.coordinators("abc") if c is not None} == {"a"}
    assert None not in voters.coordinators("abc")
    assert voters.nodes["a"].term < 10, "raised once a second at the most"
    assert ("a", Misbehaved("d", Offence.UNELECTED)) in voters.offences


_lies = st.builds(
    ElectionMessage,
    st.sampled_from(ElectionKind),
    term=st.integers(0, 30) | st.integers(0, 1 << 53),
    yes=st.booleans(),
    poll=st.booleans(),
    seen=st.integers(0, 30) | st.integers(0, 1 << 53),
    support=st.integers(0, 9),
    leader=st.sampled_from(["", *"abcd"]),
)


@settings(max_examples=examples_of(20), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), _lies, st.sampled_from([0.0, 0.3])), max_size=40))
def test_whatever_one_member_says_the_others_have_one_coordinator_afterwards(
    said: list[tuple[str, ElectionMessage, float]],
) -> None:
    """And at no time two in one term, with votes of one device for both."""
    voters = Voters("abcd")
    for receiver, lie, pause in said:
        voters.deliver("d", receiver, lie)
        voters.run_for(pause)
    voters.silent.add("d")
    voters.meet("abc")
    voters.run_for(4.0)
    voters.agreed("abc")
    config = ElectionConfig()
    most = config.term_jump + (voters.now - 50.0) * config.term_rise_per_second
    assert max(voters.nodes[id_].term for id_ in "abc") <= most + 4
    votes: dict[tuple[str, int], set[str]] = {}
    for by, peer, message in voters.sent:
        if message.kind is ElectionKind.REPLY and message.yes and not message.poll:
            votes.setdefault((by, message.term), set()).add(peer)
        elif message.kind is ElectionKind.VOTE:
            votes.setdefault((by, message.term), set()).add(by)
    assert all(len(candidates) == 1 for (by, _), candidates in votes.items() if by != "d")


def test_two_who_disagree_do_not_talk_without_end() -> None:
    voters = Voters("abc")
    voters.run_for(0.2)
    before = len(voters.sent)
    for _ in range(50):
        voters.deliver("b", "a", ElectionMessage(ElectionKind.ASK))
    assert len(voters.sent) - before == 1


_junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary()
_fields = st.sampled_from(["kind", "term", "yes", "poll", "seen", "support", "leader", "x"])


@settings(max_examples=examples_of(20), deadline=None)
@given(st.sampled_from(ElectionKind), st.dictionaries(_fields, _junk, min_size=1))
def test_a_mutated_message_is_refused_or_sane(
    kind: ElectionKind, change: dict[str, object]
) -> None:
    try:
        message = decode(ElectionMessage, encode(ElectionMessage(kind, term=3)) | change)
    except ProtocolError:
        return
    assert encode(decode(ElectionMessage, encode(message))) == encode(message)


@pytest.mark.parametrize("payload", [None, [], "poll", 7, {}, {"kind": []}, {"kind": "coup"}])
def test_nonsense_is_a_protocol_error(payload: object) -> None:
    with pytest.raises(ProtocolError):
        decode(ElectionMessage, payload)


# -- claims -------------------------------------------------------------------------------

_claims = st.builds(CoordinatorClaim, st.sampled_from("ab"), st.integers(1, 4), st.integers(1, 3))


@given(_claims, _claims)
def test_both_sides_come_to_matching_verdicts(
    one: CoordinatorClaim, other: CoordinatorClaim
) -> None:
    if one.id == other.id:
        return
    verdicts = {judge(one, other)[0], judge(other, one)[0]}
    assert verdicts in (
        {ClaimVerdict.FOLLOW, ClaimVerdict.STAY},
        {ClaimVerdict.YIELD, ClaimVerdict.RAISE},
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (("a", 7, 4), ("z", 9, 1), ClaimVerdict.RAISE),
        (("a", 9, 1), ("z", 7, 4), ClaimVerdict.YIELD),
        (("a", 7, 4), ("z", 9, 2), ClaimVerdict.FOLLOW),
        (("a", 9, 2), ("z", 7, 4), ClaimVerdict.STAY),
        (("a", 7, 2), ("z", 7, 2), ClaimVerdict.RAISE),
        (("a", 1, 1), ("z", 1, 1), ClaimVerdict.STAY),
        (("z", 1, 1), ("a", 1, 3), ClaimVerdict.FOLLOW),
    ],
)
def test_verdicts(
    ours: tuple[str, int, int], theirs: tuple[str, int, int], verdict: ClaimVerdict
) -> None:
    assert judge(CoordinatorClaim(*ours), CoordinatorClaim(*theirs))[0] is verdict


def test_a_coordinator_that_is_passed_over_is_replaced_and_may_come_back() -> None:
    voters = Voters("abc", floors={"c": 1000})
    voters.run_for(2.0)
    old, term = voters.agreed("abc")
    others = "abc".replace(old, "")
    for id_ in others:
        voters.exclude(id_, old, 60.0)
    voters.run_for(2.0)
    coordinator, later = voters.agreed(others)
    assert coordinator in others
    assert later > term
    voters.run_for(70.0)
    assert voters.agreed("abc")[1] >= later  # whichever device it is, all are at one again


def test_with_one_other_device_that_is_passed_over_one_coordinates_alone() -> None:
    voters = Voters("ab")
    voters.run_for(2.0)
    old, term = voters.agreed("ab")
    other = "ab".replace(old, "")
    voters.exclude(other, old, 60.0)
    voters.run_for(2.0)
    assert voters.nodes[other].coordinator == (other, term + 1)


def test_nothing_that_a_device_passed_over_says_counts() -> None:
    voters = Voters("ab", "c")
    voters.run_for(2.0)
    followed = voters.nodes["a"].coordinator
    voters.exclude("a", "c", 60.0)
    voters.meet("abc")
    for kind in (ElectionKind.ANNOUNCE, ElectionKind.STALE, ElectionKind.VOTE):
        voters.deliver("c", "a", ElectionMessage(kind, 900, support=9, leader=""))
    assert voters.nodes["a"].coordinator == followed
    assert voters.nodes["a"].term < 900
    assert not [message for sender, to, message in voters.sent if (sender, to) == ("a", "c")]


def test_a_device_never_passes_over_itself() -> None:
    voters = Voters("a")
    voters.exclude("a", "a", 60.0)
    assert voters.nodes["a"].coordinator == ("a", 1)
