"""The papers' devices as clusters and profiles: the published speeds are met."""

from __future__ import annotations

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from tools.paper_testbeds import ENVIRONMENTS, GIB, cluster, fed_locally, model, scaled


def profile(flops: int = 10) -> Profile:
    return Profile(
        model="test",
        input_bytes=5,
        target_bytes=1,
        units=(Unit("a", 1, 1, 1, flops), Unit("b", 1, 1, 1, flops)),
        optimizer_state_ratio=1.0,
        times=TimeTable(
            (1, 4), (UnitTimes((3.0, 1.0), (4.0, 2.0)), UnitTimes((6.0, 2.0), (8.0, 4.0)))
        ),
    )


def sample_seconds(found: Profile, slowdown: float = 1.0) -> float:
    times = found.times.at(4)
    return slowdown * (sum(times.forward) + sum(times.backward)) / 4


def test_the_best_batch_takes_the_published_time() -> None:
    found = scaled(profile(), 0.25)
    assert sample_seconds(found) == pytest.approx(0.25)
    assert found.times.at(1).forward == pytest.approx((0.15, 0.05))


def test_epochs_of_table_1_are_met() -> None:
    found = model("mobilenetv2", profile(), flops_of_resnet50=1.0)
    assert 50_000 * sample_seconds(found.profile) == pytest.approx(8.5 * 60)
    assert 50_000 * sample_seconds(found.profile, found.slowdown["nano"]) == pytest.approx(22 * 60)


def test_bert_runs_at_resnet_s_rate() -> None:
    resnet = model("resnet50", profile(), flops_of_resnet50=20.0)
    bert = model("bert-small", profile(flops=30), flops_of_resnet50=20.0)
    assert sample_seconds(bert.profile) == pytest.approx(3 * sample_seconds(resnet.profile))
    assert bert.slowdown == resnet.slowdown


def test_an_environment_s_devices_are_fastest_first_and_the_first_holds_the_data() -> None:
    found = model("resnet50", profile(), flops_of_resnet50=20.0)
    home = cluster(found, ENVIRONMENTS["C"], mbit_per_s=100)
    assert [device.name[:-2] for device in home.devices] == ["nx", *["tx2"] * 2, *["nano"] * 3]
    slowdowns = [device.slowdown for device in home.devices]
    assert slowdowns == sorted(slowdowns)
    assert home.holder.name == "nx00"
    assert home.device("nano05").memory_bytes == 3 * GIB
    assert CostModel(found.profile, home).link(0, 1).bytes_per_s == 12.5e6


def test_with_local_data_nothing_is_fed() -> None:
    found = fed_locally(profile())
    assert (found.input_bytes, found.target_bytes) == (0, 0)
