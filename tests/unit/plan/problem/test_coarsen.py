"""Which cuts of a large model are looked at."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.problem.candidates import useful_cuts
from p2ptrain.plan.types.profile import Profile
from tests.support.planning_examples import cluster, profile


def with_outputs(model: Profile, *output_bytes: int) -> Profile:
    """The same model; what crosses each cut."""
    pairs = zip(model.units, output_bytes, strict=True)
    return replace(model, units=tuple(replace(u, output_bytes=n) for u, n in pairs))


def test_small_models_keep_every_cut() -> None:
    cost = CostModel(profile([(1.0, 1.0)] * 5), cluster("a"))
    assert useful_cuts(cost, 4) == (1, 2, 3, 4)


def test_expensive_cuts_go_first() -> None:
    model = with_outputs(profile([(1.0, 2.0)] * 6), 9999, 10, 9999, 10, 9999, 1)
    assert useful_cuts(CostModel(model, cluster("a")), 2) == (2, 4)


def test_tiny_units_join_their_neighbours() -> None:
    times = [(1.0, 1.0), (0.001, 0.001), (1.0, 1.0), (0.001, 0.001), (1.0, 1.0)]
    cuts = useful_cuts(CostModel(profile(times, output_bytes=7), cluster("a")), 2)
    assert len(cuts) == 2
    assert cuts[0] in (1, 2)
    assert cuts[1] in (3, 4)


def test_parameters_count_as_time_does() -> None:
    model = profile([(1.0, 1.0)] + [(0.001, 0.001)] * 3, output_bytes=7)
    heavy = replace(model.units[2], parameter_bytes=10**6)
    model = replace(model, units=(*model.units[:2], heavy, model.units[3]))
    assert useful_cuts(CostModel(model, cluster("a")), 1) == (2,)
