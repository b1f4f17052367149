"""A translated graph, not yet cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from p2ptrain.model.capture.batch_symbol import BatchSymbol
from p2ptrain.model.graph.nodes import (
    Argument,
    GraphNode,
    InputRef,
    NodeRef,
    Reference,
    StateRef,
    TargetRef,
)


@dataclass(frozen=True, slots=True)
class Traced:
    """What tracing knows of a node besides the node itself.

    Attributes:
        value: what it gave: a fake tensor, a symbolic number, or a tuple of them.
        module: dotted path of the user's module it ran in; "" for the model itself and the loss.
        function: name of the user's function whose backward it applies; "" for all others.
    """

    value: Any
    module: str
    function: str = ""


@dataclass(frozen=True, slots=True)
class Translated:
    """One mode's graph, not yet cut.

    Attributes:
        nodes: as they run.
        traced: one for each node.
        inputs, targets: fake tensors of the leaves.
        outputs: the loss, then the leaves of the model's output.
        state: fake tensors of the parameters, buffers and constants.
        batch: reads the batch size's polynomials off symbolic sizes.
    """

    nodes: tuple[GraphNode, ...]
    traced: tuple[Traced, ...]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    outputs: tuple[InputRef | NodeRef, ...]
    state: Mapping[Reference, Tensor]
    batch: BatchSymbol

    def value_of(self, argument: Argument) -> Any:
        """The fake tensor that stands for an argument, where it is one."""
        match argument:
            case NodeRef():
                return self.traced[argument.index].value
            case InputRef():
                return self.inputs[argument.index]
            case TargetRef():
                return self.targets[argument.index]
            case StateRef():
                return self.state[argument]
        return None
