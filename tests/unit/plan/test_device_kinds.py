"""Plans for households in which some devices compute with accelerators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.check_plan import check_plan
from p2ptrain.plan.replan.replan import replan
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
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


@pytest.mark.parametrize("planner", ["auto", "hybrid", "pipedream"])
@pytest.mark.parametrize("kinds", [(CARD, CARD), (CARD, OTHER_CARD)])
def test_a_stage_is_computed_by_devices_of_one_kind(planner: str, kinds: tuple[str, ...]) -> None:
    grouped = False
    for seed in range(2):
        profile, cluster = with_cards(seed, *kinds)
        plan = make_plan(profile, cluster, PlanRequest(64, planner=planner, effort=0.02))
        assert all(len(found) == 1 for found in kinds_of(plan, cluster))
        grouped |= any(len(stage.devices) > 1 for stage in plan.stages)
    assert grouped or planner == "auto"


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


def test_a_planner_that_needs_one_kind_says_so() -> None:
    profile, cluster = with_cards(0, CARD)
    with pytest.raises(PlanError, match=f"device1: {CARD}.*drift apart.*--device cpu"):
        make_plan(profile, cluster, PlanRequest(64, planner="dp"))


def test_a_plan_written_by_hand_that_mixes_kinds_is_refused() -> None:
    profile, cluster = with_cards(0)
    plan = make_plan(profile, cluster, PlanRequest(64, planner="dp"))
    _, mixed = with_cards(0, CARD)
    with pytest.raises(OptionError, match=f"device1: {CARD}.*drift apart"):
        check_plan(plan, profile, mixed)


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
