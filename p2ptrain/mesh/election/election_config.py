"""The constants of the election, each with its unit and the cost of raising or lowering it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """Knobs of one device; all devices of a group should use the same.

    Attributes:
        stand_delay_seconds: a device without coordinator stands after a random time between these
            two. Raise the spread: fewer split votes. Lower: a new coordinator sooner.
        campaign_seconds: a poll or vote without majority is given up after a random time between
            these two. Must exceed the way there and back. Raise: slower after a split vote. Lower:
            slow links never finish a vote.
        announce_interval_seconds: the coordinator repeats itself this often. Raise: latecomers wait
            longer. Lower: traffic.
        announce_fanout: at most this many get it per interval, in random choice; newcomers and
            the whole group after an election get it at once. Raise: bursts in large groups.
            Lower: repairs take longer.
        answer_seconds: a peer's message is answered by an announcement at most this often. Raise:
            repairs take longer. Lower: two who disagree exchange more messages.
        support_seconds: a follower that has not answered for this long no longer counts as
            support. Raise: a coordinator thawed after a freeze overrates itself. Lower: a busy
            group looks like a lone device to a newcomer.
        refresh_seconds: a follower that has received nothing from it for this long asks,
            times max(1, members / announce_fanout). Raise: a coordinator that quietly stopped
            being one is noticed later. Lower: traffic.
        raise_seconds: a coordinator has itself voted into a higher term this often at most. Raise:
            two groups that meet agree later. Lower: a member that lies keeps it busy.
        polls_again: a poll is begun again at once, in a higher term, so often. Raise and lower:
            as above, the other way around.
        witness_seconds: what a member says of whom it follows counts for so long. Raise: news of
            a rival is believed that is none any more. Lower: slow links never bring it in time.
        term_jump: the own term rises by at most this at once. What is further above is ignored;
            whose own term is further from those of the others takes theirs. Raise: terms can be
            driven further. Lower: a device long away takes the household's term by that rule.
        term_rise_per_second: so much of `term_jump` comes back. Must exceed the elections per
            second that can be. Raise: terms can be driven faster.
    """

    stand_delay_seconds: tuple[float, float] = (0.05, 0.3)
    campaign_seconds: tuple[float, float] = (0.3, 0.6)
    announce_interval_seconds: float = 0.5
    announce_fanout: int = 16
    answer_seconds: float = 0.05
    support_seconds: float = 1.6
    refresh_seconds: float = 2.0
    raise_seconds: float = 1.0
    polls_again: int = 3
    witness_seconds: float = 3.0
    term_jump: int = 4096
    term_rise_per_second: float = 16.0
