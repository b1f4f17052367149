"""The description: what each stage holds, what crosses each cut, and what peers may not send."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph.decoding import LIMIT_BYTES, decode_model, is_dense
from p2ptrain.model.graph.values import sample_dimension
from p2ptrain.net import cbor
from tests.support.prepared_models import Get


@pytest.mark.parametrize("name", ["cnn", "gpt", "views", "constant_parts", "unet"])
def test_bytes_give_back_the_same_description(prepared: Get, name: str) -> None:
    description = prepared(name).model.description
    again = decode_model(description.to_bytes())
    assert again == description
    assert again.digest == description.digest
    assert len(description.digest) == 64


def test_equal_models_have_equal_digests(prepared: Get) -> None:
    digests = {prepared(name).model.description.digest for name in ("mlp", "gpt", "unet")}
    assert len(digests) == 3


def test_a_skip_crosses_every_cut_between(prepared: Get) -> None:
    description = prepared("unet").model.description
    crossing = [
        {value.name for value in description.crossing(b, "train")}
        for b in range(len(description.units) + 1)
    ]
    first = crossing[1]
    assert len(first) == 1
    for boundary in (1, 2, 3):
        assert first <= crossing[boundary]
    assert not first & crossing[4], "the fourth unit joins it"
    assert crossing[0] == {"input_0"}


def test_an_unused_input_does_not_travel_and_a_late_one_is_relayed(prepared: Get) -> None:
    description = prepared("two_inputs").model.description
    names = [
        [value.name for value in description.crossing(b, "train")]
        for b in range(len(description.units))
    ]
    assert names[0] == ["input_0", "input_1"]
    assert all("input_1" in crossing for crossing in names[:3])
    assert "input_1" not in names[-1]


def test_the_target_goes_where_the_loss_is(prepared: Get) -> None:
    description = prepared("gpt").model.description
    last = len(description.units) - 1
    for mode in ("train", "eval"):
        assert description.target_uses(0, last, mode) == ()
        assert description.target_uses(last, last + 1, mode) == (0,)


def test_shapes_follow_from_the_batch(prepared: Get) -> None:
    (value,) = prepared("cnn").model.description.crossing(1, "train")
    assert value.shape(5) == (5, *value.shape(1)[1:])
    assert sample_dimension(value) == 0
    assert value.may_require_grad
    folded = prepared("folded_batch").model.description.crossing(2, "train")
    assert [v.shape(5)[0] for v in folded] == [15]
    pairs = prepared("pairwise_in_batch").model.description.crossing(2, "train")
    assert {v.shape(5) for v in pairs} == {(5, 5), (5, 8)}
    assert None in [sample_dimension(v) for v in pairs]


def test_state_of_all_stages_is_the_whole_state(prepared: Get) -> None:
    for name in ("cnn", "gpt", "inner_structures", "outputs_with_constants"):
        description = prepared(name).model.description
        units = len(description.units)
        names = {n for u in range(units) for n in description.state_dict_names(u, u + 1)}
        assert names == set(description.state_dict)
        assert description.state_dict_names(0, units) == description.state_dict


def test_an_unused_parameter_goes_with_its_neighbour_and_is_not_needed(prepared: Get) -> None:
    description = prepared("inner_structures").model.description
    units = len(description.units)
    assert "unused" not in description.state_names(0, units)
    assert any("unused" in description.state_dict_names(u, u + 1) for u in range(units))


def test_a_tied_tensor_is_in_every_stage_that_uses_it(prepared: Get) -> None:
    description = prepared("gpt").model.description
    units = len(description.units)
    assert description.tied == {"head.weight": "embedding.weight"}
    assert description.shared_between([0, 3, 5, units]) == {"embedding.weight": (0, 2)}
    assert description.shared_between([0, units]) == {}
    for stage in ((0, 1), (units - 1, units)):
        assert "embedding.weight" in description.state_names(*stage)
        assert {"embedding.weight", "head.weight"} <= set(description.state_dict_names(*stage))
    assert "head.weight" not in description.state_dict_names(1, units - 1)


def test_a_written_buffer_lives_in_one_unit(prepared: Get) -> None:
    for name, buffer in (("shared_layer", "norm.running_mean"), ("reassigned_buffer", "mean")):
        description = prepared(name).model.description
        users = [
            u for u in range(len(description.units)) if buffer in description.state_names(u, u + 1)
        ]
        assert len(users) == 1


def test_at_most_64_units(prepared: Get) -> None:
    assert all(
        2 <= len(prepared(name).model.description.units) <= 64 for name in ("cnn", "gpt", "views")
    )


# -- hostile descriptions ------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def _set(*path: Any) -> Change:
    """Change the item at `path` (all but the last element) to the last element."""
    *where, value = path

    def change(fields: dict[str, Any]) -> None:
        item: Any = fields
        for step in where[:-1]:
            item = item[step]
        item[where[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("format", "p2ptrain.model/9"),
        _set("train", "nodes", 0, 1, "os.system"),
        _set("train", "nodes", 0, 1, "aten.from_file.default"),
        _set("train", "nodes", 0, 1, "aten.linear.out"),
        _set("train", "nodes", 0, 1, "prims.add.default"),
        _set("train", "nodes", 0, 1, "aten.__class__.default"),
        _set("train", "nodes", 0, 0, "x = 1"),
        _set("train", "nodes", 0, 0, "a" * 300),
        _set("train", "nodes", 0, 2, 0, {"n": 0}),
        _set("train", "nodes", 0, 2, 0, {"n": -1}),
        _set("train", "nodes", 1, 2, 0, {"n": 1}),
        _set("train", "nodes", 0, 2, 0, {"s": "nothing"}),
        _set("train", "nodes", 0, 2, 0, {"i": 1}),
        _set("train", "nodes", 0, 2, 0, {"i": 0, "n": 0}),
        _set("train", "nodes", 0, 2, 0, {"c": "cuda"}),
        _set("train", "nodes", 0, 2, 0, {"d": "__init__"}),
        _set("train", "nodes", 0, 2, 0, {"p": [1, 2, 3, 4]}),
        _set("train", "nodes", 0, 2, 0, [1 << 20, 1 << 20]),
        _set("train", "nodes", 0, 2, 0, [[[[[[1]]]]]]),
        _set("train", "nodes", 0, 2, [None] * 65),
        _set("train", "nodes", 0, 3, [["generator", None]]),
        _set("train", "nodes", 0, 3, [["bias", None], ["bias", None]]),
        _set("train", "nodes", 0, 4, 1),
        _set("train", "outputs", []),
        _set("train", "outputs", [{"s": "0.weight"}]),
        _set("train", "values", []),
        _set("train", "values", 0, 1, 2, "quint8"),
        _set("eval", "outputs", []),
        _set("inputs", []),
        _set("inputs", 0, 3, [[1] * 100]),
        _set("inputs", 0, 3, [[1 << 50]]),
        _set("tensors", 0, 3, [1 << 40, 1 << 40]),
        _set("tensors", 0, 3, [-1, 12]),
        _set("tensors", 0, 4, [0, 0]),
        _set("tensors", 0, 4, [1 << 36, 1]),
        _set("tensors", 0, 1, "thing"),
        _set("tensors", 0, 0, "a\nb"),
        _set("tensors", 1, 0, "0.weight"),
        _set("tied", [["other", "nothing"]]),
        _set("tied", [["0.weight", "0.bias"]]),
        _set("state_dict", ["nothing"]),
        _set("state_dict", ["0.weight", "0.weight"]),
        _set("units", []),
        _set("units", 0, 2, [1, 2]),
        _set("units", 0, 2, [0, 100000]),
        _set("units", 1, 2, [2, 1]),
        _set("units", -1, 3, [0, 0]),
        _set("units", [["u", 0, [0, 0], [0, 0]]] * 2000),
    ],
)
def test_a_hostile_description_is_refused(prepared: Get, change: Change) -> None:
    fields = cbor.loads(prepared("mlp").model.description.to_bytes(), LIMIT_BYTES)
    decode_model(cbor.dumps(fields))
    hostile = copy.deepcopy(fields)
    change(hostile)
    assert cbor.dumps(hostile) != cbor.dumps(fields)
    with pytest.raises(ProtocolError):
        decode_model(cbor.dumps(hostile))


def test_too_long_a_description_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="allowed"):
        decode_model(bytes(LIMIT_BYTES + 1))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(prepared: Get, place: int, byte: int) -> None:
    blob = bytearray(prepared("views").model.description.to_bytes())
    blob[place % len(blob)] = byte
    try:
        description = decode_model(bytes(blob))
    except ProtocolError:
        return
    for boundary in range(len(description.units) + 1):
        description.crossing(boundary, "train")
        description.crossing(boundary, "eval")


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3, 4, 5), (60, 1, 15, 3), True),
        ((2, 1, 4), (4, 4, 1), True),
        ((2, 1, 4), (4, 7, 1), True),
        ((2, 1, 4), (4, 9, 1), False),
        ((2, 3), (6, 2), False),
        ((2, 3), (0, 1), False),
        ((0, 3), (3, 1), True),
        ((), (), True),
        ((2,), (), False),
    ],
)
def test_is_dense(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, strides) is dense
