"""With or without a barrier: by seconds of an update, and by how many of them are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.plan.compare_kinds import (
    MIN_GAIN,
    PER_LATE_UPDATE,
    choose,
    choose_mode,
    lags,
    more_updates,
)
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.plan.types.weight_versions import Weights
from tests.support.delayed_pipelines import LAGS
from tests.support.delayed_reference import Recipe

STASHED = Weights.STASHED
SECONDS = st.floats(1e-3, 1e3)
LATE = st.lists(st.integers(0, 8), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("devices", "weights", "late"),
    [
        ((1, 1, 1), Weights.STASHED, (2, 1, 0)),
        ((1, 1, 1), Weights.VERTICAL, (2, 2, 2)),
        ((1, 1, 1), Weights.DOUBLE, (1, 1, 1)),
        ((1,), Weights.DOUBLE, (0,)),
        ((2, 1), Weights.STASHED, (2, 0)),  # devices that take turns count
    ],
)
def test_weights_are_as_old_as_the_formula_says(
    devices: tuple[int, ...], weights: Weights, late: tuple[int, ...]
) -> None:
    assert lags(devices, weights) == late


@pytest.mark.parametrize("weights", [Weights.STASHED, Weights.VERTICAL, Weights.DOUBLE])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_reference_in_plain_torch_is_as_late(weights: Weights, stages: int) -> None:
    lag: Callable[[int, int], int] = LAGS[weights]
    recipe = Recipe(lambda parameters: None, 1, 1, lag)  # type: ignore[arg-type, return-value]
    assert lags((1,) * stages, weights) == tuple(recipe.lag(p, stages) for p in range(stages))


@pytest.mark.parametrize("weights", Weights)
def test_updates_that_are_needed_grow_with_the_mean_delay(weights: Weights) -> None:
    each = PER_LATE_UPDATE[weights]
    assert more_updates((0, 0), weights) == 1
    assert more_updates((2, 1, 0), weights) == pytest.approx(1 + each)
    assert more_updates((2, 2, 2), weights) == pytest.approx(1 + 2 * each)
    assert each >= PER_LATE_UPDATE[STASHED]


@given(seconds=SECONDS, late=LATE)
def test_where_it_is_not_clearly_sooner_rounds_are_kept(seconds: float, late: list[int]) -> None:
    factor = more_updates(late, STASHED)
    assert choose(seconds, seconds, late, STASHED).mode is PlanMode.SYNC
    assert choose(seconds, seconds / factor / MIN_GAIN * 1.001, late, STASHED).mode is PlanMode.SYNC
    assert (
        choose(seconds, seconds / factor / MIN_GAIN * 0.999, late, STASHED).mode is PlanMode.ASYNC
    )


@given(rounds=SECONDS, free=SECONDS, late=LATE, later=st.integers(1, 4))
def test_older_weights_never_speak_for_it(
    rounds: float, free: float, late: list[int], later: int
) -> None:
    if choose(rounds, free, late, STASHED).mode is PlanMode.SYNC:
        assert choose(rounds, free, [lag + later for lag in late], STASHED).mode is PlanMode.SYNC


def test_the_reason_has_the_numbers() -> None:
    free = choose(3.0, 1.0, (2, 1, 0), STASHED)
    assert free.mode is PlanMode.ASYNC
    for words in ("3 s with sync", "1 s with async", "1 steps old", "async is 2.61 times faster"):
        assert words in free.reason
    assert "sync is" in choose(1.0, 3.0, (2, 1, 0), STASHED).reason
    assert "too little to use it" in choose(1.18, 1.0, (2, 1, 0), STASHED).reason


def _plan(seconds: float, mode: PlanMode, pieces: int) -> Plan:
    stages = tuple(
        PlannedStage((p, p + 1), (DeviceShare(name, 4),), 3 - p) for p, name in enumerate("abc")
    )
    split = BatchSplit(4 * pieces, 4)
    rate = (4 if mode is PlanMode.ASYNC else split.batch_size) / seconds
    return Plan("pp", split, stages, Predicted(seconds, rate, {}), mode=mode)


def test_the_plan_chosen_says_why_wherever_it_goes() -> None:
    rounds, free = _plan(1.0, PlanMode.SYNC, 4), _plan(0.1, PlanMode.ASYNC, 32)
    best = choose_mode(rounds, 1.0, free, Weights.STASHED)  # 16 samples take 4 x 0.1 s
    assert replace(best, mode_reason="") == free
    assert "0.4 s with async" in best.mode_reason
    read = Plan.from_json(best.to_json())
    assert (read.mode, read.mode_reason) == (PlanMode.ASYNC, best.mode_reason)
    assert replace(choose_mode(rounds, 0.4, free, Weights.STASHED), mode_reason="") == rounds
    assert "mode_reason" not in free.to_json()
