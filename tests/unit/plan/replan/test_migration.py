from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PlanError
from p2ptrain.plan.replan.migration import (
    NOTHING,
    Move,
    PendingTransfer,
    placed,
    plan_migration,
    transfer,
)
from p2ptrain.plan.replan.replan import living_cluster
from p2ptrain.plan.replan.replica_holders import Replicas, place_replicas
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from tests.support import planning_examples
from tests.support.thorough import examples_of

SPLIT = BatchSplit(4, 4)
SEVEN = planning_examples.profile([(1.0, 1.0)] * 7, parameter_bytes=50)  # 100 bytes of state each
LINK = ClusterLink(100.0, 0.25)


def straight(*stages: tuple[str, int, int]) -> Plan:
    return planning_examples.straight_plan(SPLIT, *((name, (a, b), 1) for name, a, b in stages))


def grouped(*stages: tuple[str, int, int]) -> Plan:
    """Stages given as (names of one letter, first, end)."""
    return Plan(
        planner="test",
        split=SPLIT,
        stages=tuple(
            PlannedStage((a, b), tuple(DeviceShare(n, 4 // len(names)) for n in names), 1)
            for names, a, b in stages
        ),
        predicted=Predicted(0.0, 0.0, {}),
    )


def lines(moves: Sequence[Move]) -> list[str]:
    """A picture of a migration: one line a transfer, with its occupation of the interfaces."""
    return [
        f"{move.start_seconds:g}..{move.end_seconds:g} unit {move.unit}: "
        f"{move.sender} -> {move.receiver}"
        for move in moves
    ]


def test_chain_copies_stand_with_the_next_stage_and_the_last_with_the_one_before() -> None:
    held = place_replicas(straight(("a", 0, 2), ("b", 2, 3), ("c", 3, 4)))
    assert held.holders == (("a", "b"), ("a", "b"), ("b", "c"), ("c", "b"))


def test_groups_need_no_copies_and_share_those_of_their_neighbours() -> None:
    held = place_replicas(grouped(("a", 0, 1), ("bc", 1, 2), ("d", 2, 3)))
    assert held.holders == (("a", "b"), ("b", "c"), ("d", "c"))


def test_the_holder_keeps_no_copy_of_its_own_stage_in_a_private_plan() -> None:
    held = place_replicas(straight(("h", 0, 1), ("a", 1, 2), ("h", 2, 3)))
    assert held.holders == (("h", "a"), ("a", "h"), ("h", "a"))


def test_a_lone_device_has_no_copy_but_the_global_one() -> None:
    plan = straight(("a", 0, 2))
    assert place_replicas(plan).holders == (("a",), ("a",))
    assert place_replicas(plan, global_at="h").holders_of(1) == ("a", "h")


def test_a_dead_stage_is_restored_from_its_copy_and_cuts_move_along() -> None:
    """old  a [0 1 2]    b [3 4]    c [5 6] dies;   new  a [0 1 2 3]  b [4 5 6]"""
    old = straight(("a", 0, 3), ("b", 3, 5), ("c", 5, 7))
    new = straight(("a", 0, 4), ("b", 4, 7))
    cluster = planning_examples.cluster("a", "b", link=LINK)
    migration = plan_migration(SEVEN, cluster, old, place_replicas(old), new)
    assert lines(migration.moves) == ["0..1.25 unit 3: b -> a"]
    assert migration.local == ((5, "b"), (6, "b"))
    assert migration.size_bytes == 100
    assert migration.seconds == 1.25


def test_transfers_run_side_by_side_where_their_interfaces_differ() -> None:
    """old  a [0 1 2]  b [3 4]  c [5 6];   new  a [0]  b [1 2 3]  c [4 5 6]

    up a    1 2 . .      a sends 1 then 2 to b, while b sends 4 to c
    up b    4 . . .
    """
    old = straight(("a", 0, 3), ("b", 3, 5), ("c", 5, 7))
    new = straight(("a", 0, 1), ("b", 1, 4), ("c", 4, 7))
    cluster = planning_examples.cluster("a", "b", "c", link=LINK)
    held = place_replicas(old, chain=False)
    migration = plan_migration(SEVEN, cluster, old, held, new)
    assert lines(migration.moves) == [
        "0..1.25 unit 1: a -> b",
        "0..1.25 unit 4: b -> c",
        "1..2.25 unit 2: a -> b",
    ]
    assert migration.seconds == 2.25


def test_the_nearest_holder_sends_unless_it_is_busy() -> None:
    old = grouped(("ab", 0, 6), ("c", 6, 7))
    new = grouped(("c", 0, 7))
    links = {("a", "c"): ClusterLink(100.0, 0.0), ("b", "c"): ClusterLink(10.0, 0.0)}
    cluster = Cluster(planning_examples.cluster("a", "b", "c").devices, LINK, links)
    held = place_replicas(old)
    (sender,) = {move.sender for move in plan_migration(SEVEN, cluster, old, held, new).moves}
    assert sender == "a"  # c's downlink is the bottleneck: b would hold it ten times as long
    both = grouped(("cd", 0, 7))
    cluster = planning_examples.cluster("a", "b", "c", "d", link=LINK)
    moves = plan_migration(SEVEN, cluster, old, held, both).moves
    sent = [sum(move.sender == name for move in moves) for name in ("a", "b")]
    assert abs(sent[0] - sent[1]) <= 1


def test_a_unit_that_is_nowhere_is_named() -> None:
    old = straight(("a", 0, 3), ("b", 3, 5), ("c", 5, 7))
    cluster = living_cluster(planning_examples.cluster("a", "b", "c"), ["b", "c"])
    with pytest.raises(PlanError, match='the weights of layer "unit3" are lost'):
        plan_migration(SEVEN, cluster, old, place_replicas(old), straight(("a", 0, 7)))


def test_nothing_travels_for_the_same_plan() -> None:
    old = straight(("a", 0, 3), ("b", 3, 7))
    cluster = planning_examples.cluster("a", "b")
    assert plan_migration(SEVEN, cluster, old, place_replicas(old), old) == NOTHING


@st.composite
def migrations(draw: st.DrawFn) -> tuple[Profile, Cluster, Plan, Replicas, Plan]:
    """Two random plans of groups on a random cluster, and who holds what."""
    profile = draw(planning_examples.profiles())
    cluster = draw(planning_examples.clusters(most_devices=4, tight=False))
    names = [device.name for device in cluster.devices]
    plans = [draw(_plans(len(profile.units), names)) for _ in range(2)]
    held = place_replicas(
        plans[0], chain=draw(st.booleans()), global_at=draw(st.sampled_from([None, names[0]]))
    )
    return profile, cluster, plans[0], held, plans[1]


@st.composite
def _plans(draw: st.DrawFn, units: int, names: list[str]) -> Plan:
    order = draw(st.permutations(names))
    count = draw(st.integers(1, min(units, len(order))))
    cuts = sorted(draw(st.permutations(range(1, units)))[: count - 1])
    stages = [order[p] for p in range(count)]
    stages[-1] += "".join(order[count : count + draw(st.sampled_from([0, 1]))])
    return grouped(
        *(
            (stage, first, end)
            for stage, first, end in zip(stages, [0, *cuts], [*cuts, units], strict=True)
        )
    )


@given(migrations())
@settings(derandomize=True, deadline=None, max_examples=examples_of(25))
def test_everybody_gets_exactly_what_it_lacks_from_somebody_who_has_it(
    question: tuple[Profile, Cluster, Plan, Replicas, Plan],
) -> None:
    profile, cluster, old, held, new = question
    migration = plan_migration(profile, cluster, old, held, new)
    wanted = {pair for pair in placed(new) if pair[1] not in held.holders_of(pair[0])}
    got = [(move.unit, move.receiver) for move in migration.moves]
    assert set(got) == wanted
    assert len(got) == len(wanted)
    assert all(move.sender in held.holders_of(move.unit) for move in migration.moves)
    assert migration.size_bytes == sum(
        profile.state(unit, unit + 1).version_bytes for unit, _ in wanted
    )
    assert set(migration.local) == set(placed(new)) - wanted - set(placed(old))


def naive(
    cluster: Cluster, waiting: Sequence[PendingTransfer]
) -> list[tuple[int, str, float, float]]:
    """The link rules in plain words: at every moment, look at every transfer in order."""
    times: dict[int, tuple[float, float, float]] = {}  # start, free, arrival
    now = 0.0
    while len(times) < len(waiting):
        for i, one in enumerate(waiting):
            under_way = [waiting[j] for j, (_, free, _) in times.items() if free > now]
            clash = any(one.sender == o.sender or one.receiver == o.receiver for o in under_way)
            if i not in times and not clash:
                link = cluster.link(one.sender, one.receiver)
                free = now + one.size_bytes / link.bytes_per_s
                times[i] = now, free, free + link.latency_s
        now = min((free for _, free, _ in times.values() if free > now), default=now)
    return sorted(
        (waiting[i].unit, waiting[i].receiver, start, end) for i, (start, _, end) in times.items()
    )


@given(planning_examples.clusters(most_devices=4, tight=False), st.data())
@settings(derandomize=True, deadline=None, max_examples=examples_of(25))
def test_transfers_are_timed_by_the_link_rules(cluster: Cluster, data: st.DataObject) -> None:
    names = [device.name for device in cluster.devices]
    pairs = [(a, b) for a in names for b in names if a != b]
    if not pairs:
        return
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(pairs), st.integers(0, 512)), max_size=8))
    waiting = [PendingTransfer(i, a, b, size) for i, ((a, b), size) in enumerate(drawn)]
    found = sorted(
        (move.unit, move.receiver, move.start_seconds, move.end_seconds)
        for move in transfer(cluster, waiting)
    )
    assert found == naive(cluster, waiting)
