from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.profile import Profile, Spatial
from tests.support import planning_examples

CONTENT: dict[str, Any] = {
    "format": "p2ptrain.profile/1",
    "model": "mobilenetv2",
    "input_bytes": 12288,
    "target_bytes": 8,
    "units": [
        {
            "name": "features.0",
            "parameter_bytes": 3584,
            "output_bytes": 131072,
            "activation_bytes": 524288,
            "flops": 885000,
        }
    ],
    "optimizer_state_ratio": 1.0,
    "times": {
        "1": {"forward": [0.001], "backward": [0.002]},
        "16": {"forward": [0.009], "backward": [0.017]},
    },
}
SPATIAL = {
    "kernel": 3,
    "stride": [2, 1],
    "padding": 1,
    "dilation": 1,
    "height": 32,
    "width": 16,
}


def changed(**fields: object) -> dict[str, Any]:
    return copy.deepcopy(CONTENT) | fields


def test_the_contract_example_reads_and_writes_back() -> None:
    profile = Profile.from_json(CONTENT)
    assert profile.units[0].output_bytes == 131072
    assert profile.times.at(16).backward == (0.017,)
    assert profile.to_json() == CONTENT


def test_spatial_takes_one_number_or_two() -> None:
    content = changed()
    content["units"][0]["spatial"] = SPATIAL
    profile = Profile.from_json(content)
    assert profile.units[0].spatial == Spatial((3, 3), (2, 1), (1, 1), (1, 1), 32, 16)
    assert profile.to_json() == content


def test_what_is_trained_is_said_where_it_is_not_all() -> None:
    content = changed()
    content["units"][0]["trainable_bytes"] = 84
    profile = Profile.from_json(content)
    assert profile.units[0].trained_bytes == 84
    assert profile.to_json() == content
    assert Profile.from_json(CONTENT).units[0].trained_bytes == 3584


@pytest.mark.parametrize("value", [-1, 0.5, "84", 3585])
def test_no_more_is_trained_than_there_is(value: object) -> None:
    content = changed()
    content["units"][0]["trainable_bytes"] = value
    with pytest.raises(OptionError, match=r"units\[0\].trainable_bytes"):
        Profile.from_json(content)


@given(planning_examples.profiles())
def test_json_round_trip(profile: Profile) -> None:
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "profile: expected an object, found []"),
        (changed(format="p2ptrain.profile/2"), 'profile.format: expected "p2ptrain.profile/1"'),
        (changed(model=""), "profile.model: expected a text"),
        (changed(input_bytes=1.5), "profile.input_bytes: expected a whole number, found 1.5"),
        (changed(target_bytes=-8), "profile.target_bytes: expected at least 0, found -8"),
        (changed(units=[]), "profile.units: a model needs at least one unit"),
        (changed(units={}), "profile.units: expected a list"),
        (changed(units=[{"name": "a"}]), 'units[0]: the field "parameter_bytes" is missing'),
        (changed(optimizer_state_ratio=float("inf")), "optimizer_state_ratio: expected a finite"),
        (changed(optimiser="adam"), 'profile: unknown field "optimiser"'),
        (changed(units=CONTENT["units"] * 2), "profile.times: 1 times a batch size for 2 units"),
    ],
)
def test_wrong_profiles_are_refused_by_name(content: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Profile.from_json(content)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", [key for key in CONTENT if key != "format"])
def test_every_field_is_needed(key: str) -> None:
    content = changed()
    del content[key]
    with pytest.raises(OptionError, match=f'the field "{key}" is missing'):
        Profile.from_json(content)
