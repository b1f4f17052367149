"""Reading a model description that another device sent: nothing in it is believed.

Its form, with all sizes and names, is read as declared (`description`, `nodes`); here is what shows
when the parts are put together: nodes refer only to what comes before them, and operators are
looked up in the allow-list. What passes can be run without further checks of its form; torch itself
checks shapes and index ranges while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph.argument_types import numbers_only
from p2ptrain.model.graph.custom_operators import OWN_BACKWARD
from p2ptrain.model.graph.description import FORMAT, ModelDescription, TensorDescription
from p2ptrain.model.graph.nodes import (
    Argument,
    BackwardGraph,
    Graph,
    GraphNode,
    InputRef,
    NodeRef,
    StateRef,
    TargetRef,
)
from p2ptrain.model.graph.operators import Operator, resolve
from p2ptrain.model.graph.values import ELEMENTS_LIMIT
from p2ptrain.net import cbor
from p2ptrain.net.read_form import read_form

LIMIT_BYTES = 4 << 20
"""A graph of 10,000 nodes takes 1.5 MB; decoding takes up to 70 times as much memory."""

_ITEMS = 1 << 20

_REFUSED = "a model description was refused"


def decode_model(blob: bytes) -> ModelDescription:
    """Read a model that another device sent.

    Raises:
        ProtocolError: it is not a model that this device may run.
    """
    fields = cbor.loads(blob, LIMIT_BYTES, items_limit=_ITEMS)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        _refuse("it is of another format")
    model = read_form(ModelDescription, fields, _REFUSED, extra=True)
    _check(model)
    return model


def _check(model: ModelDescription) -> None:
    names = frozenset(tensor.name for tensor in model.tensors)
    if len(names) < len(model.tensors) or not all(map(_is_possible, model.tensors)):
        _refuse("two tensors have one name, or one is malformed")
    if not names.issuperset(model.tied.values()) or not names.isdisjoint(model.tied):
        _refuse("its tied names are malformed")
    known = {*names, *model.tied}
    if not known.issuperset(model.state_dict) or len(set(model.state_dict)) < len(model.state_dict):
        _refuse("its state_dict has names without tensors, or one name twice")
    if len(model.train.outputs) != 1 or not model.evaluate.outputs:
        _refuse("it has no loss")
    leaves = _Known(len(model.inputs), len(model.targets), names)
    for mode in ("train", "eval"):
        leaves.check_graph(model.graph(mode))
        position = 0
        for unit in model.units:
            first, end = unit.nodes(mode)
            if first != position or end < first:
                _refuse("its units do not divide its graph")
            position = end
        if position != len(model.graph(mode).nodes):
            _refuse("its units do not cover its graph")
        _check_crossings(model, mode)


def _is_possible(tensor: TensorDescription) -> bool:
    learns = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    fits = math.prod(tensor.shape) <= ELEMENTS_LIMIT and is_dense(tensor.shape, tensor.strides)
    return fits and (learns or not tensor.trainable)


def _check_crossings(model: ModelDescription, mode: str) -> None:
    described = model.graph(mode).crossing_values
    for boundary in range(len(model.units) + 1):
        for value in model.crossing_values(boundary, mode):
            if isinstance(value, NodeRef) and value.index not in described:
                _refuse("a value that crosses a cut is not described")


@dataclass(frozen=True, slots=True)
class _Known:
    """What the nodes of one graph may refer to besides earlier ones.

    Attributes:
        inputs, targets: how many; of a backward what it is given, and none.
    """

    inputs: int
    targets: int
    states: frozenset[str]
    is_backward: bool = False

    def check_graph(self, graph: Graph) -> None:
        count = len(graph.nodes)
        self.check_nodes(graph.nodes)
        if not all(self.has(output, count) for output in graph.outputs):
            _refuse("a result refers to nothing")
        if any(index >= count for index in graph.crossing_values):
            _refuse("a value is of no node")

    def check_nodes(self, nodes: Sequence[GraphNode]) -> None:
        if len({node.name for node in nodes}) < len(nodes):
            _refuse("two nodes have one name")
        for index, node in enumerate(nodes):
            if not all(self.has(reference, index) for reference in node.references()):
                _refuse("an argument refers to nothing")
            if node.operator == OWN_BACKWARD:
                self._check_own_backward(node)
            else:
                check_arguments(node, resolve(node.operator))

    def has(self, argument: Argument, before: int) -> bool:
        """Whether it refers to something; `before`: nodes that there are."""
        match argument:
            case StateRef(name):
                return name in self.states
            case InputRef(index):
                return index < self.inputs
            case TargetRef(index):
                return index < self.targets
            case NodeRef(index):
                return index < before
        return False

    def _check_own_backward(self, node: GraphNode) -> None:
        match node.args:
            case (tuple() as outputs, tuple() as inputs, tuple() as kept, BackwardGraph() as graph):
                given = _Known(len(outputs) + len(kept), 0, frozenset(), is_backward=True)
            case _:
                _refuse("a backward is malformed")
        references = (InputRef, TargetRef, StateRef, NodeRef)
        plain = all(isinstance(value, references) for value in (*outputs, *inputs, *kept))
        if self.is_backward or node.kwargs or not plain or len(graph.gradients) != len(inputs):
            _refuse("a backward is in the wrong place, or gets arguments that it does not have")
        given.check_nodes(graph.nodes)
        gradients = [gradient for gradient in graph.gradients if gradient is not None]
        if not all(given.has(gradient, len(graph.nodes)) for gradient in gradients):
            _refuse("a gradient refers to nothing")


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


def _check_size(items: Sequence[Argument]) -> None:
    """A list of numbers may be the shape of a tensor to be made."""
    numbers = [abs(i) for i in items if isinstance(i, int) and not isinstance(i, bool)]
    if math.prod(n for n in numbers if n < 2**62) > ELEMENTS_LIMIT:
        _refuse("a tensor would be too large")


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of that layout fill their memory without gaps or overlaps.

    Strides of dimensions of size 1 are free up to the number of elements.
    """
    if len(shape) != len(strides):
        return False
    count = math.prod(shape)
    if count == 0 or any(s > max(count, 1) for s in strides):
        return count == 0 and all(s <= ELEMENTS_LIMIT for s in strides)
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _refuse(why: str) -> NoReturn:
    raise ProtocolError(f"{_REFUSED}: {why}")
