from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.simulation.bound import lower_bound
from p2ptrain.plan.simulation.simulate import Simulation, draft_of, simulate
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.schedule import usual_warmup
from tests.support import planning_examples
from tests.support.thorough import examples_of
from tests.unit.plan.simulation.naive import naive_peak_bytes, naive_round_seconds

A_B = planning_examples.straight_plan(BatchSplit(4, 1), ("a", (0, 1), 3), ("b", (1, 2), 1))


def spans(simulation: Simulation, kind: str, stage: int) -> list[tuple[float, float]]:
    return [
        (entry.start_seconds, entry.end_seconds)
        for entry in simulation.timeline
        if entry.kind == kind and entry.stage == stage
    ]


def test_one_holder_computes_without_pause() -> None:
    profile = planning_examples.profile([(1.0, 2.0), (0.5, 0.5)], input_bytes=100)
    plan = planning_examples.straight_plan(BatchSplit(6, 2), ("a", (0, 2), 1))
    simulation = simulate(plan, profile, planning_examples.cluster("a", link=ClusterLink(1.0, 1.0)))
    assert simulation.round_seconds == 6 * 4.0
    assert simulation.samples_per_s == 0.25
    assert simulation.busy_seconds == {"a": 24.0}


def test_a_ragged_last_micro_batch_costs_less() -> None:
    plan = planning_examples.straight_plan(BatchSplit(5, 2), ("a", (0, 1), 1))
    simulation = simulate(
        plan, planning_examples.profile([(1.0, 2.0)]), planning_examples.cluster("a")
    )
    assert simulation.round_seconds == 15.0
    assert plan.micro_batches == 3
    assert spans(simulation, "forward", 0)[-1] == (12.0, 13.0)


def test_the_holder_feeds_two_pieces_ahead() -> None:
    # b alone, fed with 2 + 1 bytes a sample at 1 byte/s: 3 s each, one transfer for both.
    profile = planning_examples.profile([(1.0, 1.0)], input_bytes=2, target_bytes=1)
    plan = Plan(
        planner="test",
        split=BatchSplit(4, 1),
        stages=(PlannedStage((0, 1), (DeviceShare("b", 1),), 1),),
        predicted=Predicted(0.0, 0.0, {}),
        left_out=(planning_examples.LeftOut("a", "only holds the data"),),
    )
    simulation = simulate(
        plan, profile, planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.5))
    )
    # Piece 0: 0..3, there at 3.5; piece 1: 3..6, there at 6.5; piece 2 queued at 3.5, starts at 6.
    assert spans(simulation, "send input", 0) == [(0.0, 3.5), (3.0, 6.5), (6.0, 9.5), (9.0, 12.5)]
    assert spans(simulation, "forward", 0) == [(3.5, 4.5), (6.5, 7.5), (9.5, 10.5), (12.5, 13.5)]
    assert simulation.round_seconds == 14.5


def test_targets_go_to_the_last_stage_only() -> None:
    profile = planning_examples.profile(
        [(1.0, 1.0)] * 2, input_bytes=50, target_bytes=3, output_bytes=0
    )
    simulation = simulate(
        A_B, profile, planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.0))
    )
    # The first output (0 bytes, at 1) waits for the two targets queued at time 0 on a's uplink.
    assert spans(simulation, "send input", 1) == [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0), (9.0, 12.0)]
    assert spans(simulation, "send output", 1)[0] == (6.0, 6.0)
    assert spans(simulation, "forward", 1)[0] == (6.0, 7.0)


def test_outputs_and_gradients_take_turns_where_they_share_an_interface() -> None:
    # The middle device sends its outputs and its gradients through one uplink.
    plan = planning_examples.straight_plan(
        BatchSplit(2, 1), ("a", (0, 1), 2), ("b", (1, 2), 2), ("c", (2, 3), 1)
    )
    profile = planning_examples.profile([(1.0, 1.0)] * 3, output_bytes=4)
    cluster = planning_examples.cluster("a", "b", "c", link=ClusterLink(1.0, 0.0))
    simulation = simulate(plan, profile, cluster)
    uplink = sorted(spans(simulation, "send output", 2) + spans(simulation, "send gradient", 0))
    assert all(end <= start for (_, end), (start, _) in pairwise(uplink))
    # F0@a 0-1, output 1-5, F0@b 5-6, output 6-10, c 10-12, gradient 12-16, B0@b 16-17, 17-21, B0@a;
    # F1@a 1-2, output 5-9, F1@b 9-10, output 10-14, c 14-16, gradient 16-20, B1@b 20-21, 21-25.
    assert spans(simulation, "send gradient", 0) == [(17.0, 21.0), (21.0, 25.0)]
    assert simulation.round_seconds == 26.0


def test_devices_of_one_machine_share_its_interface() -> None:
    """And what goes between them waits for no other transfer, nor others for it."""
    split, shares = BatchSplit(4, 2), (DeviceShare("b", 1), DeviceShare("c", 1))
    stages = (
        PlannedStage((0, 1), (DeviceShare("a", 2),), 2),
        PlannedStage((1, 2), shares, 1),
    )
    plan = Plan("test", split, stages, Predicted(0.0, 0.0, {}), ())
    profile = planning_examples.profile([(1.0, 1.0)] * 2, output_bytes=10)
    alone = planning_examples.cluster("a", "b", "c", link=ClusterLink(1.0, 0.0))

    def seconds(*machines: str) -> float:
        pairs = zip(alone.devices, machines, strict=True)
        devices = tuple(replace(device, machine=machine) for device, machine in pairs)
        return simulate(plan, profile, replace(alone, devices=devices)).round_seconds

    # outputs leave a one after the other in any case; gradients come to it one after the other too
    assert seconds("", "m", "m") == seconds("", "", "")
    assert seconds("m", "m", "") < seconds("", "", "")
    assert seconds("m", "m", "m") == seconds("", "", "")


def test_of_waiting_transfers_the_oldest_with_free_ends_starts() -> None:
    # Both targets are fed at time 0, before the first output is ready.
    plan = planning_examples.straight_plan(BatchSplit(2, 1), ("a", (0, 1), 2), ("b", (1, 2), 1))
    profile = planning_examples.profile([(1.0, 1.0), (1.0, 1.0)], output_bytes=2, target_bytes=1)
    simulation = simulate(
        plan, profile, planning_examples.cluster("a", "b", link=ClusterLink(1.0, 0.0))
    )
    order = [(e.kind, e.micro_batch) for e in simulation.timeline if e.receiver == "b"]
    assert order == [("send input", 0), ("send input", 1), ("send output", 0), ("send output", 1)]


def test_latency_delays_but_does_not_occupy() -> None:
    profile = planning_examples.profile([(1.0, 1.0), (1.0, 1.0)], output_bytes=1)
    simulation = simulate(
        A_B, profile, planning_examples.cluster("a", "b", link=ClusterLink(1.0, 10.0))
    )
    assert spans(simulation, "send output", 1)[:3] == [(1.0, 12.0), (2.0, 13.0), (3.0, 14.0)]


def test_a_private_holder_prefers_backwards_then_the_later_stage() -> None:
    plan = planning_examples.straight_plan(
        BatchSplit(4, 1), ("a", (0, 1), 4), ("b", (1, 2), 3), ("a", (2, 3), 1)
    )
    times = [(1.0, 1.0), (0.25, 0.25), (1.0, 1.0)]
    profile = planning_examples.profile(times, input_bytes=9, target_bytes=9)
    simulation = simulate(
        plan, profile, planning_examples.cluster("a", "b", link=ClusterLink(4.0, 0.0))
    )
    on_a = [
        f"{entry.kind[0]}{entry.stage}.{entry.micro_batch}"
        for entry in simulation.timeline
        if entry.device == "a" and entry.receiver is None
    ]
    # At 2 f0.2 is ready too, at 8 f2.2 and b0.0 both become first in line.
    expected = "f0.0 f0.1 f2.0 b2.0 f2.1 b2.1 f0.2 f0.3 b0.0 b0.1 f2.2"
    assert " ".join(on_a[:11]) == expected
    assert simulation.busy_seconds["a"] == 16.0
    assert not spans(simulation, "send input", 0) + spans(simulation, "send input", 2)


def test_memory_is_weights_and_what_is_in_flight() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 2, parameter_bytes=10, activation_bytes=7)
    simulation = simulate(A_B, profile, planning_examples.cluster("a", "b"))
    assert simulation.peak_bytes == {"a": 10 * 3 + 3 * 7, "b": 10 * 3 + 7}
    private = planning_examples.straight_plan(BatchSplit(3, 2), ("a", (0, 1), 2), ("a", (1, 2), 1))
    both = simulate(private, profile, planning_examples.cluster("a"))
    assert both.peak_bytes == {"a": 2 * 30 + 3 * 7 + 2 * 7}


def composition(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    """`total` as a sum of `parts` positive whole numbers."""
    cuts = st.lists(st.integers(1, max(1, total - 1)), unique=True, min_size=parts - 1)
    inner = sorted(draw(cuts.filter(lambda c: len(c) >= parts - 1))[: parts - 1])
    return [end - first for first, end in pairwise([0, *inner, total])]


def group_stage(
    draw: st.DrawFn, split: BatchSplit, names: list[str]
) -> tuple[tuple[DeviceShare, ...], Allocation]:
    """As many of the devices as can have a share, by samples or by whole micro-batches."""
    allocation = draw(st.sampled_from(sorted(EVERY_ALLOCATION)))
    total = split.micro_batch if allocation is Allocation.SAMPLES else split.micro_batches
    chosen = names[:total]
    shares = composition(draw, total, len(chosen))
    return tuple(map(DeviceShare, chosen, shares)), allocation


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Plan, Profile, Cluster]:
    """A plan of up to three stages, the holder anywhere, alone in both ends, or in no stage."""
    large = draw(st.booleans())
    profile = draw(planning_examples.profiles(least_bytes=1, least_units=3 if large else 1))
    least_devices, most_devices = (4, 6) if large else (1, 4)
    cluster = draw(
        planning_examples.clusters(most_devices, tight=False, least_devices=least_devices)
    )
    holder = cluster.holder.name
    units = len(profile.units)
    names = draw(st.permutations(sorted(device.name for device in cluster.devices)))
    split = BatchSplit(draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 4])))
    private = len(names) > 1 and units >= 3 and draw(st.booleans())
    middle = [name for name in names if not (private and name == holder)]
    stages = draw(st.integers(1, min(3 - private, len(middle), units - 2 * private)))
    used_devices = len(middle) if large else draw(st.integers(stages, len(middle)))
    members = composition(draw, used_devices, stages)
    groups = [
        group_stage(draw, split, middle[sum(members[:p]) : sum(members[: p + 1])])
        for p in range(stages)
    ]
    if private:
        alone = ((DeviceShare(holder, split.micro_batch),), Allocation.SAMPLES)
        groups = [alone, *groups, alone]
    borders = [0, *accumulate(composition(draw, units, len(groups)))]
    depths = sorted(draw(st.lists(st.integers(1, 6), min_size=4, max_size=4)), reverse=True)
    used = {device.name for devices, _ in groups for device in devices}
    plan = Plan(
        planner="test",
        split=split,
        stages=tuple(
            PlannedStage(
                (borders[p], borders[p + 1]),
                devices,
                min(depths[p], split.micro_batches),
                allocation,
            )
            for p, (devices, allocation) in enumerate(groups)
        ),
        predicted=Predicted(0.0, 0.0, {}),
        left_out=tuple(
            planning_examples.LeftOut(n, "not chosen") for n in sorted(set(names) - used)
        ),
    )
    return plan, profile, cluster


@settings(max_examples=examples_of(28), deadline=None, derandomize=True)
@given(rounds())
def test_the_naive_simulator_agrees_and_the_bound_is_below(
    case: tuple[Plan, Profile, Cluster],
) -> None:
    plan, profile, cluster = case
    simulation = simulate(plan, profile, cluster)
    assert simulation.round_seconds == pytest.approx(
        naive_round_seconds(plan, profile, cluster), rel=1e-12
    )
    assert simulation.peak_bytes == naive_peak_bytes(plan, profile, cluster)
    cost = CostModel(profile, cluster)
    assert lower_bound(cost, draft_of(plan, cost)) <= simulation.round_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_tasks_that_take_no_time_end_before_a_transfer_begins(seed: int) -> None:
    """What they give may be the older of two that wait for one interface."""
    random = Random(seed)
    names = ("a", "b", "c", "d")[: random.randint(2, 4)]
    times = [(random.choice((0.0, 1.0)), random.choice((0.0, 1.0))) for _ in names]
    profile = planning_examples.profile(times, output_bytes=random.choice((1, 2)), input_bytes=1)
    cluster = planning_examples.cluster(*names, link=ClusterLink(random.choice((1.0, 2.0)), 0.0))
    split = BatchSplit(6, 1)
    order = random.sample(names, len(names))
    depths = usual_warmup(len(names), split.micro_batches)
    stages = [(name, (p, p + 1), depths[p]) for p, name in enumerate(order)]
    plan = planning_examples.straight_plan(split, *stages)
    assert simulate(plan, profile, cluster).round_seconds == pytest.approx(
        naive_round_seconds(plan, profile, cluster), rel=1e-12
    )
