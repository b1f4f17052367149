"""Only what is trained has gradients, optimizer state and further versions."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.plan.types.profile import Profile, StateBytes
from tests.support import planning_examples

SIZES = st.integers(0, 1 << 40)


@st.composite
def states(draw: st.DrawFn) -> StateBytes:
    parameter_bytes = draw(SIZES)
    trainable_bytes = draw(st.integers(0, parameter_bytes))
    return StateBytes(parameter_bytes, trainable_bytes, draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])))


@given(states())
def test_a_device_holds_what_the_contract_says(state: StateBytes) -> None:
    trained = state.trainable_bytes * (1 + state.optimizer_state_ratio)
    assert state.held_bytes == math.ceil(state.parameter_bytes + trained)
    assert state.summed_bytes == state.trainable_bytes


@given(states())
def test_of_a_version_only_the_frozen_weights_do_not_change(state: StateBytes) -> None:
    assert state.version_bytes == state.frozen_bytes + state.changing_bytes
    assert state.held_bytes - state.version_bytes == state.trainable_bytes  # the gradients


@given(st.integers(0, 1 << 40), st.sampled_from([0.0, 1.0, 2.0]))
def test_where_all_is_trained_all_of_it_counts(size: int, ratio: float) -> None:
    state = StateBytes(size, size, ratio)
    assert state.held_bytes == size * (2 + ratio)
    assert state.version_bytes == state.changing_bytes == size * (1 + ratio)


@given(planning_examples.profiles())
def test_units_add_up(profile: Profile) -> None:
    count = len(profile.units)
    whole, each = profile.state(0, count), [profile.state(i, i + 1) for i in range(count)]
    assert whole.parameter_bytes == sum(state.parameter_bytes for state in each)
    assert whole.trained == sum(state.trained for state in each)
    assert whole.summed_bytes == sum(state.summed_bytes for state in each)


@given(planning_examples.profiles())
def test_a_profile_that_says_that_all_is_trained_is_one_that_says_nothing(profile: Profile) -> None:
    silent = tuple(replace(unit, trainable_bytes=None) for unit in profile.units)
    said = tuple(replace(unit, trainable_bytes=unit.parameter_bytes) for unit in profile.units)
    count = len(profile.units)
    states = [replace(profile, units=units).state(0, count) for units in (silent, said)]
    assert states[0] == states[1]
