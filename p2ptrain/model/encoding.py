"""A model description as strict CBOR.

Arguments of nodes travel as themselves where CBOR has them (None, bool, int, float, text, lists);
everything else is a map with one key that says what it is. `decoding` is the other direction.

    {"i": 0} input   {"t": 0} target    {"s": name} state   {"n": 3} node   {"p": [0, 1]} polynomial
    {"d": "float32"} dtype   {"m": "channels_last"} memory format   {"l": "strided"} layout
    {"c": "cpu"} device   {"z": [0.0, 1.0]} complex number
    {"b": [[node, ...], [{"n": 3}, null]]} a backward, with {"i": 0} for what it is given
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from p2ptrain.model.graph import (
    Argument,
    BackwardGraph,
    Graph,
    InputRef,
    Node,
    NodeRef,
    StateRef,
    TargetRef,
)
from p2ptrain.model.values import Polynomial, ValueDescription
from p2ptrain.net import cbor

if TYPE_CHECKING:
    from p2ptrain.model.description import ModelDescription, TensorDescription, UnitDescription

FORMAT = "p2ptrain.model/1"


def encode(model: ModelDescription) -> bytes:
    """The bytes of `ModelDescription.to_bytes`."""
    return cbor.dumps(
        {
            "format": FORMAT,
            "name": model.name,
            "inputs": [_value(value) for value in model.inputs],
            "targets": [_value(value) for value in model.targets],
            "tensors": [_tensor(tensor) for tensor in model.tensors],
            "tied": [[alias, name] for alias, name in model.tied.items()],
            "state_dict": list(model.state_dict),
            "train": _graph(model.train),
            "eval": _graph(model.evaluate),
            "units": [_unit(unit) for unit in model.units],
        }
    )


def name_of(value: torch.dtype | torch.memory_format | torch.layout) -> str:
    """ "float32" for torch.float32."""
    return str(value).removeprefix("torch.")


def _value(value: ValueDescription) -> list[Any]:
    return [
        value.name,
        "tensor",
        name_of(value.dtype),
        [list(dimension.coefficients) for dimension in value.dimensions],
        value.may_require_grad,
    ]


def _tensor(tensor: TensorDescription) -> list[Any]:
    return [
        tensor.name,
        tensor.kind.value,
        name_of(tensor.dtype),
        list(tensor.shape),
        list(tensor.strides),
        tensor.trainable,
    ]


def _unit(unit: UnitDescription) -> list[Any]:
    return [unit.name, unit.flops, list(unit.train), list(unit.evaluate)]


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "nodes": [_node(node) for node in graph.nodes],
        "outputs": [_argument(output) for output in graph.outputs],
        "values": [[index, _value(value)] for index, value in graph.crossing_values.items()],
    }


def _node(node: Node) -> list[Any]:
    args = [_argument(argument) for argument in node.args]
    kwargs = [[name, _argument(argument)] for name, argument in node.kwargs]
    return [node.name, node.operator, args, kwargs, node.grad_enabled]


def _argument(argument: Argument) -> Any:
    match argument:
        case tuple():
            return [_argument(item) for item in argument]
        case InputRef():
            return {"i": argument.index}
        case TargetRef():
            return {"t": argument.index}
        case StateRef():
            return {"s": argument.name}
        case NodeRef():
            return {"n": argument.index}
        case Polynomial():
            return {"p": list(argument.coefficients)}
        case torch.dtype():
            return {"d": name_of(argument)}
        case torch.memory_format():
            return {"m": name_of(argument)}
        case torch.layout():
            return {"l": name_of(argument)}
        case torch.device():
            return {"c": argument.type}
        case BackwardGraph():
            gradients = [_argument(gradient) for gradient in argument.gradients]
            return {"b": [[_node(node) for node in argument.nodes], gradients]}
        case complex():
            return {"z": [argument.real, argument.imag]}
        case _:
            return argument
