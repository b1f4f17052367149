"""What a graph of another device takes is known before anything of it runs."""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2ptrain.errors import ProtocolError, TooLarge
from p2ptrain.model.graph.decoding import LIMIT_BYTES, decode_model
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import GraphNode, InputRef
from p2ptrain.model.graph.operators import resolve
from p2ptrain.model.stage.result_sizes import needs_of, node_needs, stage_needs
from p2ptrain.net import cbor
from p2ptrain.profiling.measure_units import measure_units
from tests.support.prepared_models import prepare

MEMORY_BYTES = 512 << 20
Item = list[Any]


def _node(name: str, operator: str, *args: Any, **kwargs: Any) -> Item:
    return [name, operator, list(args), [[key, value] for key, value in kwargs.items()], True]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """A description of two layers, as it travels."""
    description = prepare("mlp").model.description
    fields: dict[str, Any] = cbor.loads(description.to_bytes(), LIMIT_BYTES)
    return fields


def _with(fields: dict[str, Any], *nodes: Item) -> ModelDescription:
    """The model with nodes before its own. Raises what reading it raises."""
    changed, more = copy.deepcopy(fields), len(nodes)

    def moved(argument: Any) -> Any:
        if isinstance(argument, dict) and "n" in argument:
            return {"n": argument["n"] + more}
        return [moved(item) for item in argument] if isinstance(argument, list) else argument

    for mode in ("train", "eval"):
        graph = changed[mode]
        own = [[n[0], n[1], moved(n[2]), moved(n[3]), n[4]] for n in graph["nodes"]]
        graph["nodes"] = [*nodes, *own]
        graph["outputs"] = [moved(output) for output in graph["outputs"]]
        graph["values"] = [[index + more, value] for index, value in graph["values"]]
    for unit in changed["units"]:
        for place in (2, 3):
            first, end = unit[place]
            unit[place] = [first + more if first else 0, end + more if end else 0]
    return decode_model(cbor.dumps(changed))


def _n(index: int) -> dict[str, int]:
    return {"n": index}


_X = {"i": 0}

NEVER_READ = {
    "out of bounds": [_node("e", "aten._reshape_alias.default", _X, [4096], [1])],
    "a number as a type": [_node("e", "aten.zeros_like.default", _X, dtype=-1)],
    "a number as a layout": [_node("e", "aten.clone.default", _X, memory_format=4)],
    "numbers alone": [_node("e", "aten.remainder.int", 1, 0)],
    "a text": [_node("e", "operator.mul", "a" * 512, 1 << 20)],
    "a list": [_node("e", "operator.mul", [None] * 4096, 1 << 17)],
    "a format": [_node("e", "operator.mod", "%2000000000d", 1)],
    "no number as a scale": [
        _node("e", "aten._upsample_bilinear2d_aa.default", _X, [2, 2], False, float("nan"), 1e18)
    ],
    "as often as a number says": [_node("e", "aten.mvlgamma.default", _X, 1 << 31)],
    "one argument twice": [_node("e", "aten.relu.default", _X, self=_X)],
    "a keyword in its place": [_node("e", "aten.clone.default", _X, {"m": "preserve_format"})],
    "nothing": [_node("e", "aten.relu.default")],
}


@pytest.mark.parametrize("nodes", NEVER_READ.values(), ids=list(NEVER_READ))
def test_what_may_do_more_than_compute_is_not_read(
    plain: dict[str, Any], nodes: list[Item]
) -> None:
    _with(plain)
    with pytest.raises(ProtocolError, match=r"operator|gets"):
        _with(plain, *nodes)


_BIG = 1 << 30

TOO_LARGE = {
    "arange": [_node("e", "aten.arange.default", 1 << 31)],
    "a copy of an expanded tensor": [
        _node("e", "aten.ones.default", [1]),
        _node("f", "aten.expand.default", _n(0), [_BIG]),
        _node("g", "aten.clone.default", _n(1), memory_format={"m": "contiguous_format"}),
    ],
    "inside an operator": [
        _node("e", "aten.ones.default", [1, 2]),
        _node("f", "aten.expand.default", _n(0), [_BIG, 2]),
        _node("g", "aten.reshape.default", _n(1), [2, _BIG]),
    ],
    "repeated": [_node("e", "aten.repeat.default", _X, [1 << 20, 1 << 10])],
    "many views": [
        _node("e", "aten.ones.default", [1]),
        _node("f", "aten.expand.default", _n(0), [_BIG]),
        _node("g", "aten.unbind.int", _n(1)),
    ],
    "nothing, along a long side": [
        _node("e", "aten.ones.default", [3, 4, 4, 2]),
        _node("f", "aten.adaptive_max_pool3d.default", _n(0), [1 << 62, 1, 0]),
    ],
    "many parts": [_node("e", "aten.tensor_split.sections", _X, 1 << 40)],
    "many views, many times": [
        _node("e", "aten.ones.default", [1 << 13]),
        *(_node(f"u{k % 10}", "aten.unbind.int", _n(0)) for k in range(9)),
    ],
    "frequencies": [_node("e", "aten.fft_rfftfreq.default", (1 << 31) - 1)],
    "padding": [_node("e", "aten.constant_pad_nd.default", _X, [1 << 32, 0])],
    "a gradient of one element": [
        _node("e", "aten.select_backward.default", _X, [1 << 32, 4, 12], 0, 0)
    ],
    "squares": [
        _node("e", "operator.mul", 1 << 31, 1 << 31),
        _node("f", "operator.mul", _n(0), _n(0)),
    ],
    "a long matrix power": [
        _node("e", "aten.ones.default", [8000, 8000]),
        *(_node(f"p{k}", "aten.linalg_matrix_power.default", _n(k), 1 << 40) for k in range(8)),
    ],
    "hours": [
        _node("e", "aten.ones.default", [8192, 8192]),
        *(_node(f"p{k}", "aten.mm.default", _n(0), _n(0)) for k in range(100)),
    ],
    "as many classes as a number says": [
        _node("e", "aten.ones.default", [4], dtype={"d": "int64"}),
        _node("f", "aten.one_hot.default", _n(0), _BIG),
    ],
    "as often as a tensor says": [
        _node("e", "aten.ones.default", [4], dtype={"d": "int64"}),
        _node("f", "aten.repeat_interleave.Tensor", _n(0)),
    ],
    "a size out of a tensor": [
        _node("e", "aten.ones.default", [], dtype={"d": "int64"}),
        _node("f", "aten.item.default", _n(0)),
        _node("g", "operator.mul", _n(1), 2),
        _node("h", "aten.ones.default", [_n(2)]),
    ],
}


@pytest.mark.parametrize("nodes", TOO_LARGE.values(), ids=list(TOO_LARGE))
def test_what_is_too_much_is_refused_before_it_runs(
    plain: dict[str, Any], nodes: list[Item]
) -> None:
    description = _with(plain, *nodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TooLarge, ProtocolError, ValueError), match=r"\b[a-z]\d? \(|may use|hours"):
        measure_units(description, batch_sizes=[1], memory_bytes=MEMORY_BYTES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


Change = Callable[[dict[str, Any]], None]


def _tensor_of(elements: int) -> Change:
    def change(fields: dict[str, Any]) -> None:
        name, kind, *_ = fields["tensors"][0]
        fields["tensors"][0] = [name, kind, "float32", [elements], [1], False]

    return change


def _input_of(*dimensions: list[int]) -> Change:
    def change(fields: dict[str, Any]) -> None:
        fields["inputs"][0][3] = [*dimensions]

    return change


@pytest.mark.parametrize(
    "change",
    [
        _tensor_of(700_000_000),
        _tensor_of(1 << 37),
        _input_of([0, 1], [1 << 38]),
        _input_of([-(1 << 38), 1], [-8]),
        _input_of([1 << 20], [1 << 20]),
    ],
)
def test_weights_and_samples_are_counted_before_they_are_made(
    plain: dict[str, Any], change: Change
) -> None:
    changed = copy.deepcopy(plain)
    change(changed)
    description = decode_model(cbor.dumps(changed))
    with pytest.raises((TooLarge, ProtocolError, ValueError), match=r"size|GB|TB|same reduction"):
        measure_units(description, batch_sizes=[1], memory_bytes=MEMORY_BYTES)


def test_a_backward_of_the_models_own_is_counted_too(plain: dict[str, Any]) -> None:
    backward = {"b": [[_node("b", "aten.ones.default", [_BIG])], [{"n": 0}]]}
    description = _with(
        plain,
        _node("e", "aten.relu.default", _X),
        ["f", "p2ptrain.own_backward", [[_n(0)], [_X], [], backward], [], True],
    )
    with pytest.raises(TooLarge, match="this device may use"):
        measure_units(description, batch_sizes=[1], memory_bytes=MEMORY_BYTES)


def test_sizes_that_are_too_much_are_left_out(plain: dict[str, Any]) -> None:
    description = _with(
        plain,
        _node("e", "aten.expand.default", _X, [1 << 12, {"p": [0, 1]}, 12]),
        _node("f", "aten.clone.default", _n(0), memory_format={"m": "contiguous_format"}),
    )
    measured = measure_units(
        description, batch_sizes=[1, 1 << 14], budget_seconds=1e9, memory_bytes=64 << 20
    )
    assert 1 in measured.times.sizes
    assert max(measured.times.sizes) < 1 << 14


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_what_is_known_is_what_torch_keeps(name: str) -> None:
    batch = 4
    description = prepare(name).model.description
    known = needs_of(description, 0, len(description.units), "train", batch)
    measured = measure_units(description, batch_sizes=[batch], budget_seconds=0.0)
    kept = sum(unit.activation_bytes for unit in measured.units) * batch
    assert 0.8 * kept <= sum(need.kept_bytes for need in known) <= 1.6 * kept + 4096
    assert all(need.peak_bytes >= need.kept_bytes for need in known)


def test_many_nodes_take_little_time_to_know(plain: dict[str, Any]) -> None:
    nodes = [_node("e0", "aten.relu.default", _X)]
    nodes += [_node(f"e{k}", "aten.mul.Tensor", _n(k - 1), _X) for k in range(1, 600)]
    description = _with(plain, *nodes)
    stage_needs(description, 0, len(description.units), "train", 4)
    began = time.thread_time()
    stage_needs(description, 0, len(description.units), "train", 4)
    assert time.thread_time() - began < 0.5, "under 0.1 s where nothing else runs"


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("operator.mul", (1 << 62, 4)),
        ("operator.mul", ("a", 4)),
        ("operator.add", ([1], [2])),
        ("operator.floordiv", (1, 0)),
        ("operator.getitem", (torch.ones(3), 0)),
        ("operator.getitem", ([1], 2)),
        ("torch.sym_int", ("1",)),
        ("math.floor", (float("inf"),)),
    ],
)
def test_arithmetic_is_of_numbers_of_64_bits(operator: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, IndexError)):
        resolve(operator).call(*arguments)


def test_one_node_by_itself() -> None:
    node = GraphNode("n", "aten.matmul.default", (InputRef(0), InputRef(1)), (), True)
    a, b = torch.ones(8, 100, requires_grad=True), torch.ones(100, 50)
    needs = node_needs(node, [a, b])
    assert needs.peak_bytes >= 4 * (8 * 100 + 100 * 50 + 8 * 50)
    assert needs.work >= 2 * 8 * 100 * 50
