from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import OptionError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.overlap import COPY_PART, FEED_MESSAGES, LOAD_MESSAGES, ROUND_MESSAGES
from p2ptrain.plan.simulation.allreduce import sent_in
from p2ptrain.plan.simulation.bound import lower_bound
from p2ptrain.plan.simulation.simulate import Simulation, draft_of, simulate
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import REFERENCE, Cluster, ClusterDevice, ClusterLink, Overheads
from p2ptrain.plan.types.gradient_sums import MIN_BYTES
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.planning_examples import quick_request
from tests.support.thorough import examples_of
from tests.unit.plan.simulation.test_simulate import rounds

NOTHING = Overheads(0.0, 0.0, 0.0)


def with_overheads(cluster: Cluster, overheads: Overheads) -> Cluster:
    devices = tuple(replace(device, overheads=overheads) for device in cluster.devices)
    return replace(cluster, devices=devices)


def shared_plan(*devices: str, units: int) -> Plan:
    """One stage on all of them, a sample each, one micro-batch."""
    split = BatchSplit(len(devices), len(devices))
    shares = tuple(DeviceShare(name, 1) for name in devices)
    stage = PlannedStage((0, units), shares, 1)
    return Plan("test", split, (stage,), Predicted(0.0, 0.0, {}))


def ends(simulation: Simulation, kind: str) -> list[tuple[float, float]]:
    return [
        (entry.start_seconds, entry.end_seconds)
        for entry in simulation.timeline
        if entry.kind == kind
    ]


@settings(derandomize=True, deadline=None, max_examples=examples_of(8))
@given(rounds())
def test_the_plain_model_does_not_know_overheads(drawn: tuple[Plan, Profile, Cluster]) -> None:
    plan, profile, cluster = drawn
    assert simulate(plan, profile, with_overheads(cluster, REFERENCE)) == simulate(
        plan, profile, cluster
    )


@settings(derandomize=True, deadline=None, max_examples=examples_of(25))
@given(
    rounds(),
    st.sampled_from([NOTHING, REFERENCE, Overheads(0.5, 0.01, 0.01)]),
    st.booleans(),
)
def test_no_round_is_faster_than_its_bound(
    drawn: tuple[Plan, Profile, Cluster], overheads: Overheads, ahead: bool
) -> None:
    plan, profile, cluster = drawn
    cluster = with_overheads(cluster, overheads)
    cost = CostModel(profile, cluster, overlap=True, updates_ahead=ahead)
    simulation = simulate(plan, profile, cluster, overlap=True, updates_ahead=ahead)
    assert lower_bound(cost, draft_of(plan, cost)) <= simulation.round_seconds * (1 + 1e-9)
    assert all(busy <= simulation.round_seconds for busy in simulation.busy_seconds.values())


def test_where_sums_turn_the_bound_counts_the_messages_that_are_sent() -> None:
    """A backward makes 1, 1, 2 and 4 MiB; where it turns behind the first, 4 and 3 are sent."""
    mib = 2**20
    profile = planning_examples.profile([(0.01, 0.01)] * 4)
    sizes = (4 * mib, 2 * mib, mib, mib)
    units = tuple(
        replace(unit, parameter_bytes=size) for unit, size in zip(profile.units, sizes, strict=True)
    )
    profile = replace(profile, units=units)
    cluster = with_overheads(
        planning_examples.cluster("a", "b", link=ClusterLink(1e7, 0.0)), Overheads(0.1, 0.0, 0.0)
    )
    cost, plan = CostModel(profile, cluster, overlap=True), shared_plan("a", "b", units=4)
    draft = draft_of(plan, cost)
    assert cost.overlap is not None
    sent = sent_in(cost, draft, 0)
    assert sent.turns
    assert len(sent.buckets) < len(cost.overlap.buckets(0, 4, cost.bucket_sizes((0, 1))))
    simulated = simulate(plan, profile, cluster, overlap=True).round_seconds
    assert lower_bound(cost, draft) <= simulated * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=examples_of(8))
@given(rounds())
def test_without_overheads_and_links_it_is_the_plain_model(
    drawn: tuple[Plan, Profile, Cluster],
) -> None:
    plan, profile, cluster = drawn
    cluster = replace(cluster, links={}, default_link=planning_examples.FREE)
    cluster = with_overheads(cluster, NOTHING)
    plain, overlapped = (
        simulate(plan, profile, cluster, overlap=overlap) for overlap in (False, True)
    )
    assert overlapped.round_seconds == pytest.approx(plain.round_seconds)
    assert overlapped.peak_bytes == plain.peak_bytes


def test_messages_and_bytes_cost_both_ends() -> None:
    profile = planning_examples.profile([(1.0, 1.0), (1.0, 1.0)], output_bytes=10)
    plan = planning_examples.straight_plan(BatchSplit(2, 2), ("a", (0, 1), 1), ("b", (1, 2), 1))
    cluster = with_overheads(planning_examples.cluster("a", "b"), Overheads(0.25, 0.01, 0.0))
    simulation = simulate(plan, profile, cluster, overlap=True)
    message, target = 0.25 + 20 * 0.01, FEED_MESSAGES * 0.25
    loading, round_s = LOAD_MESSAGES * 0.25, ROUND_MESSAGES * 0.25
    # a: forward, output sent, target fed; b: the same received; back: gradient sent and received.
    first, second = ends(simulation, "forward")
    assert first == pytest.approx((0.0, 2 + message + target + loading))
    assert second == pytest.approx((first[1], first[1] + 2 + message + target))
    assert simulation.round_seconds == pytest.approx(second[1] + 2 * (2 + message) + round_s)


def _dealt(*groups: tuple[str, ...]) -> Plan:
    """A unit on each group; four micro-batches of two samples, dealt evenly."""
    stages = tuple(
        PlannedStage(
            (p, p + 1),
            tuple(DeviceShare(name, 4 // len(names)) for name in names),
            warmup=4 - p,
            allocation=Allocation.MICRO_BATCHES,
        )
        for p, names in enumerate(groups)
    )
    return Plan("test", BatchSplit(8, 2), stages, Predicted(0.0, 0.0, {}))


@pytest.mark.parametrize(
    ("plan", "fed"),
    [
        (_dealt(("a", "b")), 0.0),
        (_dealt(("a", "b"), ("c",)), 4 * FEED_MESSAGES + 8 * 1 * 0.01),
        (_dealt(("c",), ("b", "a")), 4 * FEED_MESSAGES + 8 * 3 * 0.01),
    ],
)
def test_the_holder_loads_and_feeds_all_pieces(plan: Plan, fed: float) -> None:
    """Messages take 1 s and bytes 10 ms at either end.

    What b receives, and its part of the sums, costs a as much; a loads four pieces and feeds c.
    """
    profile = planning_examples.profile(
        [(1.0, 1.0)] * len(plan.stages), input_bytes=3, target_bytes=1
    )
    names = sorted(name for stage in plan.stages for name in (d.name for d in stage.devices))
    cluster = with_overheads(planning_examples.cluster(*names), Overheads(1.0, 0.01, 0.0))
    busy = simulate(plan, profile, cluster, overlap=True).busy_seconds
    assert busy["a"] - busy["b"] == pytest.approx(4 * LOAD_MESSAGES + fed)


def test_an_update_takes_time_by_its_parameters_and_their_state() -> None:
    profile = planning_examples.profile(
        [(1.0, 1.0)], parameter_bytes=100
    )  # state as large as parameters
    plan = planning_examples.straight_plan(BatchSplit(1, 1), ("a", (0, 1), 1))
    cluster = with_overheads(planning_examples.cluster("a"), Overheads(0.0, 0.0, 0.01))
    simulation = simulate(plan, profile, cluster, overlap=True)
    assert ends(simulation, "update") == [(2.0, 4.0)]
    assert simulation.round_seconds == 4.0


def _with_parameters_behind(latency_s: float, *, updates_ahead: bool) -> Simulation:
    """Two stages; the second one's update takes 2 s, and its first forward begins at 1 s."""
    profile = planning_examples.profile([(1.0, 3.0), (1.0, 1.0)])
    units = profile.units[0], replace(profile.units[1], parameter_bytes=100)
    plan = planning_examples.straight_plan(BatchSplit(1, 1), ("a", (0, 1), 1), ("b", (1, 2), 1))
    cluster = planning_examples.cluster("a", "b", link=ClusterLink(1e300, latency_s))
    cluster = with_overheads(cluster, Overheads(0.0, 0.0, 0.01))
    profile = replace(profile, units=units)
    return simulate(plan, profile, cluster, overlap=True, updates_ahead=updates_ahead)


def test_an_update_of_a_later_stage_begins_when_all_are_done_and_is_hidden_by_the_way_there() -> (
    None
):
    simulation = _with_parameters_behind(0.0, updates_ahead=False)
    assert ends(simulation, "backward") == [(2.0, 3.0), (3.0, 6.0)]
    assert ends(simulation, "update") == [(6.0, 6.0), (6.0, 8.0)]
    assert simulation.round_seconds == 7.0


def test_the_holder_learns_of_a_round_and_tells_everybody() -> None:
    simulation = _with_parameters_behind(0.25, updates_ahead=False)
    assert ends(simulation, "backward") == [(2.25, 3.25), (3.5, 6.5)]
    assert ends(simulation, "update") == [(7.0, 7.0), (7.0, 9.0)]
    assert simulation.round_seconds == 9.0 - 1.25


def test_ahead_an_update_begins_when_the_stage_is_done() -> None:
    """Copying what was before costs a part of it. The first stage is done last."""
    simulation = _with_parameters_behind(0.25, updates_ahead=True)
    update = 2.0 * (1 + COPY_PART)
    assert ends(simulation, "backward") == [(2.25, 3.25), (3.5, 6.5)]
    assert ends(simulation, "update") == [(3.25, pytest.approx(3.25 + update)), (6.5, 6.5)]
    assert simulation.round_seconds == 6.5


def test_ahead_no_update_begins_before_the_word_on_the_last_one() -> None:
    """Stage b is done after 2 s of a round and hears at 6.5 + 2 x 4 that a is, too."""
    simulation = _with_parameters_behind(4.0, updates_ahead=True)
    assert ends(simulation, "backward") == [(6.0, 7.0), (11.0, 14.0)]
    assert simulation.round_seconds == 14.0 + 2 * 4.0 - 7.0


@settings(derandomize=True, deadline=None, max_examples=examples_of(13))
@given(rounds(), st.sampled_from([NOTHING, replace(REFERENCE, update_byte_seconds=0.0)]))
def test_updates_that_cost_nothing_lose_nothing_by_going_ahead(
    drawn: tuple[Plan, Profile, Cluster], overheads: Overheads
) -> None:
    plan, profile, cluster = drawn
    cluster = with_overheads(cluster, overheads)
    waiting, ahead = (
        simulate(plan, profile, cluster, overlap=True, updates_ahead=ahead).round_seconds
        for ahead in (False, True)
    )
    assert ahead <= waiting * (1 + 1e-9)


def test_the_first_two_pieces_are_there_when_a_round_begins() -> None:
    profile = planning_examples.profile([(1.0, 1.0)], input_bytes=1)
    plan = planning_examples.straight_plan(BatchSplit(2, 1), ("b", (0, 1), 1))
    plan = replace(plan, left_out=(planning_examples.LeftOut("a", "only holds the data"),))
    cluster = with_overheads(
        planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.5)), NOTHING
    )
    assert simulate(plan, profile, cluster).round_seconds == 1.5 + 4.0
    the_word = 2 * 0.5  # to the holder and back
    waiting = simulate(plan, profile, cluster, overlap=True, updates_ahead=False)
    assert waiting.round_seconds == 4.0 + the_word
    assert simulate(plan, profile, cluster, overlap=True).round_seconds == 4.0


def test_feeding_all_the_time_limits_a_round() -> None:
    profile = planning_examples.profile([(1.0, 1.0)], input_bytes=5)
    plan = planning_examples.straight_plan(BatchSplit(2, 1), ("b", (0, 1), 1))
    plan = replace(plan, left_out=(planning_examples.LeftOut("a", "only holds the data"),))
    cluster = with_overheads(
        planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.5)), NOTHING
    )
    assert simulate(plan, profile, cluster, overlap=True).round_seconds == 10.0


def _reducing(
    bytes_per_s: float, where: int, byte_seconds: float = 0.0, updates_ahead: bool = True
) -> Simulation:
    """Two devices; unit `where` of two has a bucket of parameters; backwards of 10 s each."""
    profile = planning_examples.profile([(1.0, 10.0), (1.0, 10.0)])
    units = list(profile.units)
    units[where] = replace(units[where], parameter_bytes=MIN_BYTES)
    profile = replace(profile, units=tuple(units))
    overheads = replace(NOTHING, byte_seconds=byte_seconds)
    cluster = with_overheads(
        planning_examples.cluster("a", "b", link=ClusterLink(bytes_per_s, 0.0)), overheads
    )
    plan = shared_plan("a", "b", units=2)
    return simulate(plan, profile, cluster, overlap=True, updates_ahead=updates_ahead)


def test_an_all_reduce_is_hidden_behind_the_backwards_that_follow() -> None:
    # Unit 1's gradients are made at 12, 2(g-1)/g = 1 times its bytes take 5 s, unit 0 until 22.
    simulation = _reducing(MIN_BYTES / 5, where=1)
    assert ends(simulation, "all-reduce") == [(12.0, 17.0)] * 2
    assert ends(simulation, "backward") == [(2.0, 22.0)] * 2
    assert simulation.round_seconds == 22.0


def test_an_all_reduce_of_the_first_unit_cannot_be_hidden() -> None:
    simulation = _reducing(MIN_BYTES / 5, where=0)
    assert ends(simulation, "all-reduce") == [(22.0, 27.0)] * 2
    assert simulation.round_seconds == 27.0


def test_an_all_reduce_longer_than_what_hides_it_delays_its_unit_s_next_forward() -> None:
    assert _reducing(MIN_BYTES / 15, where=1).round_seconds == 27.0 - 1.0
    waiting = _reducing(MIN_BYTES / 15, where=1, updates_ahead=False)
    assert waiting.round_seconds == 27.0, "where updates wait for the word, for all sums too"


def test_what_the_wire_has_not_begun_when_the_backward_is_over_goes_first_units_first() -> None:
    """
    compute   ... B2 B1 B0 | F0 waits  | F1 waits  | F2
    wire             [  2  ][    0    ][    1    ]
    """
    profile = planning_examples.profile([(15.0, 10.0)] * 3)
    units = tuple(replace(unit, parameter_bytes=MIN_BYTES) for unit in profile.units)
    profile = replace(profile, units=units)
    link = ClusterLink(MIN_BYTES / 20, 0.0)  # a bucket takes 20 s
    cluster = with_overheads(planning_examples.cluster("a", "b", link=link), NOTHING)
    plan = shared_plan("a", "b", units=3)
    turned = simulate(plan, profile, cluster, overlap=True)
    # Unit 2's sum is there at 55 + 20, unit 0's at 95, unit 1's at 115, when F0 has taken 15.
    assert ends(turned, "all-reduce") == [(55.0, 115.0)] * 2
    assert turned.round_seconds == 115.0 - 15.0
    waiting = simulate(plan, profile, cluster, overlap=True, updates_ahead=False)
    assert waiting.round_seconds == 115.0


def test_what_an_uplink_carries_in_a_round_bounds_it_sums_among_it() -> None:
    profile = planning_examples.profile([(1.0, 1.0)], input_bytes=8)
    units = (replace(profile.units[0], parameter_bytes=MIN_BYTES),)
    profile = replace(profile, units=units)
    rate = MIN_BYTES / 20
    cluster = with_overheads(
        planning_examples.cluster("a", "b", link=ClusterLink(rate, 0.0)), NOTHING
    )
    plan = shared_plan("a", "b", units=1)
    bare = simulate(plan, profile, cluster, overlap=True).round_seconds
    fed = replace(profile, input_bytes=MIN_BYTES)
    assert bare == pytest.approx(22.0)
    half = plan.split.batch_size / 2  # samples that the holder feeds to b, 20 s each
    assert simulate(plan, fed, cluster, overlap=True).round_seconds >= 20.0 * (1 + half)


@pytest.mark.parametrize(
    ("link_seconds", "expected"),
    [
        (5.0, 22.0 + 4.0),  # hidden from the links' point of view: the core has more to do
        (
            15.0,
            12.0 + 15.0 + 4.0 - 1.0,
        ),  # unit 1 waits for links: only the only bucket's messages come on top
    ],
)
def test_messages_of_an_all_reduce_take_their_part_of_the_core_while_links_carry(
    link_seconds: float, expected: float
) -> None:
    """A bucket's bytes go out and come in once each: 2 s + 2 s of the core."""
    each = 2.0 / MIN_BYTES
    found = _reducing(MIN_BYTES / link_seconds, where=1, byte_seconds=each)
    assert found.round_seconds == pytest.approx(expected)


def test_while_links_carry_large_sums_only_the_last_bucket_s_messages_are_waited_for() -> None:
    profile = planning_examples.profile([(1.0, 10.0), (1.0, 10.0)])
    units = tuple(replace(unit, parameter_bytes=MIN_BYTES) for unit in profile.units)
    overheads = replace(NOTHING, byte_seconds=2.0 / MIN_BYTES)
    slow = ClusterLink(MIN_BYTES / 30.0, 0.0)
    cluster = with_overheads(planning_examples.cluster("a", "b", link=slow), overheads)
    plan = shared_plan("a", "b", units=2)
    taken = simulate(plan, replace(profile, units=units), cluster, overlap=True)
    assert taken.round_seconds == pytest.approx(12.0 + 2 * 30.0 + 4.0)
    assert taken.busy_seconds["a"] == pytest.approx(22.0 + 2 * 4.0)


def test_an_all_reduce_waits_for_links_that_gradients_occupy() -> None:
    # Stage 1 is b and c; its gradients to a take b's uplink until 4 + 8, then its sums go to c.
    profile = planning_examples.profile([(1.0, 1.0), (1.0, 1.0)], output_bytes=8)
    units = profile.units[0], replace(profile.units[1], parameter_bytes=MIN_BYTES)
    profile = replace(profile, units=units)
    links = {(s, "a"): ClusterLink(1.0, 0.0) for s in "bc"} | {
        ("a", s): ClusterLink(1e300, 0.0) for s in "bc"
    }
    cluster = replace(
        planning_examples.cluster("a", "b", "c"), links=links, default_link=ClusterLink(1e300, 0.0)
    )
    stages = (
        PlannedStage((0, 1), (DeviceShare("a", 2),), 1),
        PlannedStage((1, 2), (DeviceShare("b", 1), DeviceShare("c", 1)), 1),
    )
    plan = Plan("test", BatchSplit(2, 2), stages, Predicted(0.0, 0.0, {}))
    simulation = simulate(plan, profile, with_overheads(cluster, NOTHING), overlap=True)
    assert ends(simulation, "backward")[:2] == [(3.0, 4.0)] * 2
    assert ends(simulation, "send gradient") == [(4.0, 12.0), (12.0, 20.0)]
    assert simulation.round_seconds == 22.0


@pytest.mark.parametrize(("bytes_per_s", "carried"), [(1.0, 10.0 - 3.0), (5.0, 0.0)])
def test_a_message_is_sent_and_read_while_the_link_carries_it(
    bytes_per_s: float, carried: float
) -> None:
    """Its two ends take 1 s and 2 s of 10 bytes; what is left of the link's time is in between."""
    profile = planning_examples.profile([(1.0, 1.0), (1.0, 1.0)], output_bytes=10)
    cluster = planning_examples.cluster("a", "b", link=ClusterLink(bytes_per_s, 0.5))
    devices = [
        replace(device, overheads=replace(NOTHING, byte_seconds=byte_seconds))
        for device, byte_seconds in zip(cluster.devices, (0.1, 0.2), strict=True)
    ]
    plan = planning_examples.straight_plan(BatchSplit(1, 1), ("a", (0, 1), 1), ("b", (1, 2), 1))
    simulation = simulate(plan, profile, replace(cluster, devices=tuple(devices)), overlap=True)
    ((start, arrival),) = ends(simulation, "send output")
    assert start == pytest.approx(1.0 + 1.0)
    assert arrival - start == pytest.approx(carried + 0.5)


def test_unmeasured_overheads_grow_with_the_slowdown() -> None:
    profile, cluster = planning_examples.household(1, units=4, devices=2)
    twice = ClusterDevice("twice", 1, times=profile.times.times_slowdown(2.0))
    cost = CostModel(profile, replace(cluster, devices=(*cluster.devices, twice)), overlap=True)
    assert cost.overlap is not None
    for device, overheads in zip(cost.devices, cost.overlap.overheads, strict=True):
        slowdown = 2.0 if device is twice else device.slowdown
        assert overheads.message_seconds == pytest.approx(REFERENCE.message_seconds * slowdown)


@pytest.mark.parametrize("planner", ["auto", "pp", "single"])
def test_planners_judge_by_it(planner: str) -> None:
    profile, cluster = planning_examples.household(3, units=6, devices=3)
    request = quick_request(64, planner=planner, overlap=True)
    plan = make_plan(profile, cluster, request)
    simulation = simulate(plan, profile, cluster, overlap=True)
    assert plan.predicted.round_seconds == pytest.approx(simulation.round_seconds)


def test_auto_avoids_small_messages_where_they_are_dear() -> None:
    profile, cluster = planning_examples.household(3, units=6, devices=3)
    dear = with_overheads(cluster, replace(REFERENCE, message_seconds=1.0))
    plan = make_plan(profile, dear, quick_request(64, overlap=True))
    assert len(plan.stages) == 1


def test_overheads_go_through_json() -> None:
    _, cluster = planning_examples.household(1, units=2, devices=2)
    cluster = with_overheads(cluster, REFERENCE)
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_what_older_files_say_of_compression_is_read_and_not_used() -> None:
    profile, cluster = planning_examples.household(1, units=2, devices=2)
    cluster = with_overheads(cluster, REFERENCE)
    plan = make_plan(profile, cluster, quick_request(2, micro_batch=1, planner="pp"))
    units, devices = profile.to_json(), cluster.to_json()
    units["units"][0]["compression"] = {"output": 0.5}
    devices["devices"][0]["overheads"] |= {"pack_byte_seconds": 1.0, "unpack_byte_seconds": 1.0}
    stages = plan.to_json()
    stages["stages"][0] |= {"compression": ["output"], "interiors": [1]}
    assert Profile.from_json(units) == profile
    assert Cluster.from_json(devices) == cluster
    assert Plan.from_json(stages, batch_size=2) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"byte_second": 1}, 'unknown field "byte_second"'),
        ({"message_seconds": -1}, "overheads.message_seconds: expected at least 0"),
        ({"message_seconds": float("nan")}, "overheads.message_seconds: expected a finite"),
    ],
)
def test_wrong_overheads_are_named(change: dict[str, float], message: str) -> None:
    _, cluster = planning_examples.household(1, units=2, devices=1)
    content = cluster.to_json()
    content["devices"][0]["overheads"] = asdict(REFERENCE) | change
    with pytest.raises(OptionError, match=message):
        Cluster.from_json(content)
