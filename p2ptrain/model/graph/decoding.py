"""Reading a model description that another device sent: nothing in it is believed.

Sizes are capped before anything is built, every name and number is checked, nodes refer only to
what comes before them, and operators are looked up in the allow-list. What passes can be run
without further checks of its form; torch itself checks shapes and index ranges while it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph.argument_types import numbers_only
from p2ptrain.model.graph.custom_operators import OWN_BACKWARD
from p2ptrain.model.graph.description import (
    FORMAT,
    ModelDescription,
    TensorDescription,
    TensorKind,
    UnitDescription,
    last_uses,
    name_of,
)
from p2ptrain.model.graph.nodes import (
    Argument,
    BackwardGraph,
    Graph,
    GraphNode,
    InputRef,
    NodeRef,
    Reference,
    StateRef,
    TargetRef,
)
from p2ptrain.model.graph.operators import Operator, resolve
from p2ptrain.model.graph.values import (
    CROSSING_DTYPES,
    MAXIMUM_DEGREE,
    MOST_LENGTHS,
    Polynomial,
    Term,
    ValueDescription,
)
from p2ptrain.net import cbor

T = TypeVar("T")

LIMIT_BYTES = 4 << 20
"""A graph of 10,000 nodes takes 1.5 MB; decoding takes up to 70 times as much memory."""

_ITEMS = 1 << 20

_NODES = 50_000

_LEAVES = 4_096

_TENSORS = 20_000

_UNITS = 1_024

_DIMENSIONS = 16

_LIST_ITEMS = 4_096

_TERMS = 16

_ELEMENTS = 1 << 38
"""Most elements of one tensor, and the largest size: 1 TiB of float32, more than any device has."""

_NAME_LENGTH = 512

_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")

_DTYPES = {name_of(dtype): dtype for dtype in CROSSING_DTYPES}

_MEMORY_FORMATS = {
    name_of(value): value
    for value in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


def decode_model(blob: bytes) -> ModelDescription:
    """Read a model that another device sent.

    Raises:
        ProtocolError: it is not a model that this device may run.
    """
    fields = _map(cbor.loads(blob, LIMIT_BYTES, items_limit=_ITEMS))
    if fields.get("format") != FORMAT:
        _refuse("it is of another format")
    inputs = _list(fields.get("inputs"), _value, _LEAVES)
    targets = _list(fields.get("targets"), _value, _LEAVES)
    tensors = _list(fields.get("tensors"), _tensor, _TENSORS)
    names = frozenset(tensor.name for tensor in tensors)
    if len(names) < len(tensors):
        _refuse("two tensors have one name")
    read = _GraphReader(len(inputs), len(targets), names)
    model = ModelDescription(
        name=_name(fields.get("name")),
        inputs=inputs,
        targets=targets,
        tensors=tensors,
        tied=_tied(fields.get("tied"), names),
        state_dict=_list(fields.get("state_dict"), _name, _TENSORS),
        train=read.graph(fields.get("train")),
        evaluate=read.graph(fields.get("eval")),
        units=_list(fields.get("units"), _unit, _UNITS),
        longest=_list(fields.get("longest", []), lambda n: _integer(n, 1, _ELEMENTS), MOST_LENGTHS),
    )
    _check(model)
    return model


def _check(model: ModelDescription) -> None:
    """What only shows when the parts are put together."""
    if not model.units or not model.inputs:
        _refuse("it has no units or no inputs")
    if len(model.train.outputs) != 1 or not model.evaluate.outputs:
        _refuse("it has no loss")
    for mode in ("train", "eval"):
        position = 0
        for unit in model.units:
            first, end = unit.nodes(mode)
            if first != position or end < first:
                _refuse("its units do not divide its graph")
            position = end
        if position != len(model.graph(mode).nodes):
            _refuse("its units do not cover its graph")
        _check_crossings(model, mode)
    known = {*model.tensors_by_name, *model.tied}
    if not known.issuperset(model.state_dict) or len(set(model.state_dict)) < len(model.state_dict):
        _refuse("its state_dict has names without tensors, or one name twice")


def _check_crossings(model: ModelDescription, mode: str) -> None:
    described = model.graph(mode).crossing_values
    for boundary in range(len(model.units) + 1):
        for value in model.crossing_values(boundary, mode):
            if isinstance(value, NodeRef) and value.index not in described:
                _refuse("a value that crosses a cut is not described")


class _GraphReader:
    """Reads one graph; a backward is one whose inputs are what it is given."""

    def __init__(
        self, inputs: int, targets: int, states: frozenset[str], *, is_backward: bool = False
    ) -> None:
        self._inputs = inputs
        self._targets = targets
        self._states = states
        self._is_backward = is_backward

    def graph(self, value: Any) -> Graph:
        fields = _map(value)
        nodes = self.nodes(fields.get("nodes"))
        outputs = _list(fields.get("outputs"), lambda o: self.output(o, len(nodes)), _LEAVES)
        values = dict(_list(fields.get("values"), lambda v: _node_value(v, len(nodes)), _NODES))
        last_uses(nodes, outputs)
        return Graph(nodes, outputs, values)

    def nodes(self, value: Any) -> tuple[GraphNode, ...]:
        nodes = tuple(self._node(item, k) for k, item in enumerate(_items(value, _NODES)))
        if len({node.name for node in nodes}) < len(nodes):
            _refuse("two nodes have one name")
        return nodes

    def _node(self, value: Any, index: int) -> GraphNode:
        name, operator, args, kwargs, grad_enabled = _fields(value, 5)
        if not isinstance(name, str) or not _NODE_NAME.fullmatch(name):
            _refuse("a node's name is no identifier")
        if not isinstance(operator, str) or not isinstance(grad_enabled, bool):
            _refuse("a node is malformed")
        if operator == OWN_BACKWARD:
            given = self._own_backward(args, kwargs, index)
            return GraphNode(name, operator, given, (), grad_enabled)
        allowed = resolve(operator)
        node = GraphNode(
            name,
            operator,
            tuple(self._argument(item, index, 4) for item in _items(args, 64)),
            tuple(self._named(item, index) for item in _items(kwargs, 64)),
            grad_enabled,
        )
        check_arguments(node, allowed)
        return node

    def _own_backward(self, args: Any, kwargs: Any, index: int) -> tuple[Argument, ...]:
        *listed, backward = _fields(args, 4)
        if self._is_backward or _items(kwargs, 0):
            _refuse("a backward is in the wrong place, or gets arguments that it does not have")
        outputs, inputs, kept = (
            _list(values, lambda value: self._reference_in(value, index), _LIST_ITEMS)
            for values in listed
        )
        return outputs, inputs, kept, _backward(backward, len(outputs) + len(kept), len(inputs))

    def _reference_in(self, value: Any, before: int) -> Reference:
        if not isinstance(value, dict) or len(value) != 1:
            _refuse("an argument is malformed")
        return self._reference(*next(iter(value.items())), before)

    def _named(self, value: Any, index: int) -> tuple[str, Argument]:
        name, argument = _fields(value, 2)
        return _name(name), self._argument(argument, index, 4)

    def output(self, value: Any, nodes: int) -> InputRef | NodeRef:
        argument = self._argument(value, nodes, 1)
        if not isinstance(argument, InputRef | NodeRef):
            _refuse("an output is neither a node nor an input")
        return argument

    def _argument(self, value: Any, before: int, depth: int) -> Argument:
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return _integer(value, 1 - 2**63, 2**63 - 1)
        if isinstance(value, str):
            return _text(value)
        if isinstance(value, list) and depth:
            return tuple(self._argument(i, before, depth - 1) for i in _items(value, _LIST_ITEMS))
        if not isinstance(value, dict) or len(value) != 1:
            _refuse("an argument is malformed")
        ((kind, content),) = value.items()
        if kind == "z":
            return complex(*(_real(part) for part in _fields(content, 2)))
        return _plain(kind, content) or self._reference(kind, content, before)

    def _reference(self, kind: str, content: Any, before: int) -> Reference:
        if kind == "s" and isinstance(content, str) and content in self._states:
            return StateRef(content)
        if kind == "i":
            return InputRef(_integer(content, 0, self._inputs - 1))
        if kind == "t":
            return TargetRef(_integer(content, 0, self._targets - 1))
        if kind == "n":
            return NodeRef(_integer(content, 0, before - 1))
        return _refuse("an argument refers to nothing")


def check_arguments(node: GraphNode, operator: Operator) -> None:
    """Do nothing where the node's arguments are of the types that its operator takes.

    Raises:
        ProtocolError: they are not, or a list is the shape of a tensor that no device holds.
    """
    if operator.types is not None:
        wrong = operator.types.wrong(node.args, node.kwargs)
    else:
        numbers = numbers_only(node.args) and not node.kwargs
        wrong = None if numbers else "something else than numbers"
    if wrong is not None:
        _refuse(f"{node.name[:40]}: {operator.name} gets {wrong}")
    for argument in (*node.args, *(argument for _, argument in node.kwargs)):
        if isinstance(argument, tuple):
            _check_size(argument)


def _backward(value: Any, given: int, inputs: int) -> BackwardGraph:
    if not isinstance(value, dict) or value.keys() != {"b"}:
        _refuse("a backward is malformed")
    listed, results = _fields(value["b"], 2)
    reader = _GraphReader(given, 0, frozenset(), is_backward=True)
    nodes = reader.nodes(listed)
    gradients = [
        None if g is None else reader.output(g, len(nodes)) for g in _fields(results, inputs)
    ]
    return BackwardGraph(nodes, tuple(gradients))


def _plain(kind: str, content: Any) -> Argument:
    """An argument that is no reference, or None."""
    if kind == "p":
        return _polynomial(content)
    tables: Mapping[str, Mapping[str, Argument]] = {
        "d": _DTYPES,
        "m": _MEMORY_FORMATS,
        "l": {"strided": torch.strided},
        "c": {"cpu": torch.device("cpu")},
    }
    if kind not in tables:
        return None
    return _choice(content, tables[kind])


def _check_size(items: Sequence[Argument]) -> None:
    """A list of numbers may be the shape of a tensor to be made."""
    numbers = [abs(i) for i in items if isinstance(i, int) and not isinstance(i, bool)]
    if math.prod(n for n in numbers if n < 2**62) > _ELEMENTS:
        _refuse("a tensor would be too large")


def _node_value(value: Any, nodes: int) -> tuple[int, ValueDescription]:
    index, described = _fields(value, 2)
    return _integer(index, 0, nodes - 1), _value(described)


def _value(value: Any) -> ValueDescription:
    name, kind, dtype, dimensions, may_require_grad = _fields(value, 5)
    if kind != "tensor" or not isinstance(may_require_grad, bool):
        _refuse("a value is malformed")
    return ValueDescription(
        _name(name),
        _choice(dtype, _DTYPES),
        _list(dimensions, _polynomial, _DIMENSIONS),
        may_require_grad,
    )


def _polynomial(value: Any) -> Polynomial:
    items = list(_items(value, MAXIMUM_DEGREE + 2))
    terms = _list(items.pop(), _term, _TERMS) if items and isinstance(items[-1], list) else ()
    coefficients = _list(items, lambda c: _integer(c, -_ELEMENTS, _ELEMENTS), MAXIMUM_DEGREE + 1)
    if not coefficients or (len(coefficients) > 1 and coefficients[-1] == 0):
        _refuse("a size is malformed")
    return Polynomial(coefficients, terms)


def _term(value: Any) -> Term:
    coefficient, powers = _fields(value, 2)
    read = _list(powers, lambda p: _integer(p, 0, MAXIMUM_DEGREE), MOST_LENGTHS + 1)
    if len(read) < 2 or not read[-1]:
        _refuse("a size is malformed")
    return Term(_integer(coefficient, -_ELEMENTS, _ELEMENTS), read)


def _tensor(value: Any) -> TensorDescription:
    name, kind, dtype, shape, strides, trainable = _fields(value, 6)
    sizes = _list(shape, lambda n: _integer(n, 0, _ELEMENTS), _DIMENSIONS)
    steps = _list(strides, lambda n: _integer(n, 0, _ELEMENTS), _DIMENSIONS)
    if math.prod(sizes) > _ELEMENTS or not is_dense(sizes, steps):
        _refuse("a tensor has an impossible layout")
    described = _choice(dtype, _DTYPES)
    kinds = {kind.value: kind for kind in TensorKind}
    can_learn = described.is_floating_point or described.is_complex
    if not isinstance(trainable, bool) or (trainable and not can_learn):
        _refuse("a tensor is malformed")
    return TensorDescription(_name(name), _choice(kind, kinds), described, sizes, steps, trainable)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of that layout fill their memory without gaps or overlaps.

    Strides of dimensions of size 1 are free up to the number of elements.
    """
    if len(shape) != len(strides):
        return False
    count = math.prod(shape)
    if count == 0 or any(s > max(count, 1) for s in strides):
        return count == 0 and all(s <= _ELEMENTS for s in strides)
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _unit(value: Any) -> UnitDescription:
    name, flops, train, evaluate = _fields(value, 4)
    return UnitDescription(_name(name), _integer(flops, 0, 2**62), _range(train), _range(evaluate))


def _range(value: Any) -> tuple[int, int]:
    first, end = _fields(value, 2)
    return _integer(first, 0, _NODES), _integer(end, 0, _NODES)


def _tied(value: Any, names: frozenset[str]) -> dict[str, str]:
    pairs = _list(value, lambda pair: _fields(pair, 2), _TENSORS)
    tied = {_name(alias): _name(name) for alias, name in pairs}
    if not names.issuperset(tied.values()) or not names.isdisjoint(tied):
        _refuse("its tied names are malformed")
    return tied


def _refuse(why: str) -> NoReturn:
    raise ProtocolError(f"a model description was refused: {why}")


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse("a part of it is missing")


def _items(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        _refuse(f"a list is missing or has more than {most} items")
    return value


def _fields(value: Any, count: int) -> list[Any]:
    return value if isinstance(value, list) and len(value) == count else _refuse("it is malformed")


def _list(value: Any, read: Callable[[Any], T], most: int) -> tuple[T, ...]:
    return tuple(read(item) for item in _items(value, most))


def _integer(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        _refuse("a number is out of its range")
    return value


def _real(value: Any) -> float:
    return value if isinstance(value, float) else _refuse("a number is malformed")


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _NAME_LENGTH:
        _refuse("a text is too long")
    return value


def _name(value: Any) -> str:
    text = _text(value)
    return text if text.isprintable() else _refuse("a name is not printable")


def _choice(value: Any, table: Mapping[str, T]) -> T:
    if not isinstance(value, str) or value not in table:
        _refuse("a type is unknown")
    return table[value]
