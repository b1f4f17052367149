"""Plans for households in which some devices compute with accelerators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.compare_kinds import bias_checked_plan
from p2ptrain.plan.cost.check_plan import check_plan
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.replan.replan import replan
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink, Overheads
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.planning_examples import PLENTY, household

CARD, OTHER_CARD = "cuda 9.0 card, torch 2.9", "xpu card, torch 2.9"


def with_cards(seed: int, *kinds: str, units: int = 8) -> tuple[Profile, Cluster]:
    """A random household whose first devices, but for the holder, are cards."""
    profile, cluster = household(seed, units, 5)
    holder, *others = cluster.devices
    cards = [
        replace(device, compute=kind, slowdown=0.2)
        for device, kind in zip(others, kinds, strict=False)
    ]
    return profile, replace(cluster, devices=(holder, *cards, *others[len(cards) :]))


def kinds_of(plan: Plan, cluster: Cluster) -> list[set[str]]:
    """Of every stage."""
    return [
        {cluster.device(device.name).compute for device in stage.devices} for stage in plan.stages
    ]


@pytest.mark.parametrize("kinds", [(CARD, CARD), (CARD, OTHER_CARD)])
def test_auto_gives_a_stage_to_devices_of_one_kind(kinds: tuple[str, ...]) -> None:
    for seed in range(2):
        profile, cluster = with_cards(seed, *kinds)
        for doubts in (False, True):
            request = PlanRequest(64, effort=0.02)
            plan = bias_checked_plan(make_plan, profile, cluster, request) if doubts else None
            plan = plan or make_plan(profile, cluster, request)
            assert all(len(found) == 1 for found in kinds_of(plan, cluster))


@pytest.mark.parametrize("planner", ["dp", "hybrid", "pipedream"])
def test_who_asks_for_another_planner_gets_several_kinds_in_a_stage(planner: str) -> None:
    mixed = False
    for seed in range(3):
        profile, cluster = with_cards(seed, CARD, OTHER_CARD)
        plan = make_plan(profile, cluster, PlanRequest(64, planner=planner))
        check_plan(plan, profile, cluster)
        mixed |= any(len(found) > 1 for found in kinds_of(plan, cluster))
    assert mixed


def test_an_update_on_the_host_of_a_card_takes_the_host_s_time() -> None:
    """And that of the weights' way back; the stage's processors take as long as ever."""
    profile, cluster = with_cards(0, CARD, CARD)
    slow = Overheads(message_seconds=1e-3, byte_seconds=2e-9, update_byte_seconds=1e-13)
    devices = tuple(
        replace(one, overheads=slow) if one.compute == CARD else one for one in cluster.devices
    )
    cost = CostModel(profile, replace(cluster, devices=devices), overlap=True)
    cards = [number for number, one in enumerate(cost.devices) if one.compute == CARD]
    other = next(number for number in range(5) if number not in cards)
    end, state = cost.unit_count, cost.state(0, cost.unit_count)
    alone = cost.update_seconds(cards[0], 0, end)
    assert cost.update_seconds(cards[0], 0, end, group=cards) == alone
    mixed = cost.update_seconds(cards[0], 0, end, group=(*cards, other))
    more = state.changing_bytes * (2e-10 - 1e-13) + state.trainable_bytes * 2e-9
    assert mixed - alone == pytest.approx(more)
    assert cost.update_seconds(other, 0, end, group=(*cards, other)) == cost.update_seconds(
        other, 0, end
    )


def test_a_plan_close_to_another_keeps_kinds_apart() -> None:
    profile, cluster = with_cards(1, CARD, CARD)
    request = PlanRequest(64, effort=0.03)
    before = make_plan(profile, cluster, request)
    for device in cluster.devices[1:]:
        left = replace(
            cluster,
            devices=tuple(d for d in cluster.devices if d is not device),
            links={ends: link for ends, link in cluster.links.items() if device.name not in ends},
        )
        near = replace(request, micro_batch=before.micro_batch)
        replicas = place_replicas(before, chain=True)
        plan = replan(profile, left, before, near, planner=make_plan, replicas=replicas).plan
        assert all(len(found) == 1 for found in kinds_of(plan, left))


def test_without_rounds_kinds_share_no_stage() -> None:
    profile, cluster = with_cards(0, CARD)
    request = PlanRequest(64, planner="dp", mode=PlanMode.ASYNC)
    with pytest.raises(PlanError, match=f"device1: {CARD}.*in whole rounds only.*--mode sync"):
        make_plan(profile, cluster, request)
    _, alike = with_cards(0)
    plan = make_plan(profile, alike, request)
    with pytest.raises(OptionError, match=f"device1: {CARD}.*in whole rounds only"):
        check_plan(plan, profile, cluster)


@pytest.mark.parametrize(("times", "holder"), [(50.0, "laptop"), (200.0, "desktop")])
def test_beside_a_fast_card_no_device_makes_a_step_slower(times: float, holder: str) -> None:
    profile, _ = household(3, 12, 1)
    slowdowns = {"desktop": 1.0, "laptop": times, "mini": 1.4 * times, "pi": 8 * times}
    devices = tuple(
        ClusterDevice(
            name, PLENTY, slowdown, name == holder, compute=CARD if slowdown == 1.0 else "cpu"
        )
        for name, slowdown in slowdowns.items()
    )
    cluster = Cluster(devices, ClusterLink(12.5e6, 0.001))
    request = PlanRequest(256, overlap=True, effort=0.1)
    plan = make_plan(profile, cluster, request)
    alone = make_plan(profile, cluster, replace(request, only=frozenset({"desktop"})))
    assert plan.predicted.round_seconds <= alone.predicted.round_seconds
    assert "desktop" in plan.device_names
    reasons = {out.name: out.reason for out in plan.left_out}
    assert reasons.keys() == slowdowns.keys() - plan.device_names
    assert "pi" in reasons
    assert all(reasons.values())
