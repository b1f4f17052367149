"""Which of a model's first units can be tiled: from its graph to maps and operators.

Nodes are taken in order, from the model's inputs on, until one joins positions that are far from
each other, changes a map's meaning (flatten, attention) or draws random numbers for it. Shapes are
worked out here: the description holds those of values that cross cuts only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from p2ptrain.model.graph.description import Mode, ModelDescription, TensorKind, UnitDescription
from p2ptrain.model.graph.effects import (
    draws_random_numbers,
    mutated_references,
    uses_batch_statistics,
)
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, StateRef, TargetRef
from p2ptrain.model.graph.operators import is_allowed
from p2ptrain.plan.types.feature_maps import ELEMENTWISE, FeatureMap, MapNetwork, MapUnit, Operation
from p2ptrain.tiling.kernels.tileable_operators import (
    BINARY,
    CASTS,
    CONVOLUTIONS,
    IDENTITIES,
    MAY_ALIAS,
    PADDINGS,
    POOLINGS,
    UNARY,
    NotTiled,
    TiledPart,
    Windows,
    arguments_of,
    convolution_windows,
    elementwise_function,
    is_in_place,
    last_cut,
    map_shape,
    out_of_place,
    padding_windows,
    pooling_windows,
)

_COUNTERS = ("aten.add_.Tensor", "aten.add_.Scalar")

_PLAIN: Windows = (ELEMENTWISE, ELEMENTWISE)


def read_tiled_part(
    description: ModelDescription,
    mode: Mode = "train",
    *,
    whole_units: bool = False,
    most_units: int | None = None,
) -> TiledPart:
    """The longest run of nodes from the model's inputs on that can be tiled.

    Args:
        description: of the model.
        mode: which of its graphs.
        whole_units: end behind a unit, even where some nodes of the next one could be tiled.
        most_units: end behind so many units, even where the next one could be tiled.

    Raises:
        NotTiled: not even the first operator of the first unit can be; says why.
    """
    reader = _Reader(description, mode)
    nodes = description.graph(mode).nodes
    if most_units is not None:
        nodes = nodes[: description.node_range(0, most_units, mode)[1]]
    stop, refusal = len(nodes), None
    for index in range(len(nodes)):
        try:
            reader.take(index)
        except NotTiled as error:
            stop, refusal = index, str(error)
            break
    stop = last_cut(description, mode, stop, whole_units=whole_units)
    return reader.finish(stop, refusal)


@dataclass(frozen=True, slots=True)
class _ReadOperation:
    """An operation, the index of its node, and what the node's references stand for."""

    node: int
    operation: Operation
    reads: Mapping[Reference, int]


class _Reader:
    """Takes one node after the other; what it has at any time is a valid network."""

    def __init__(self, description: ModelDescription, mode: Mode) -> None:
        self._description = description
        self._mode: Mode = mode
        self._nodes = description.graph(mode).nodes
        self._maps: list[FeatureMap] = []
        self._map_of: dict[Reference, int] = {}
        self._shared: set[int] = set()  # maps that may share memory with another one
        self._entering: dict[int, int] = {}  # map -> leaf of the model's input
        self._made: list[_ReadOperation] = []
        self._written = {  # tensors of the state that some node changes
            reference.name
            for node in self._nodes
            for reference in mutated_references(node)
            if isinstance(reference, StateRef)
        }
        self._counters: list[int] = []
        self._itemsize = 0
        self._dtype: torch.dtype | None = None  # of all maps

    # -- one node --------------------------------------------------------------------------------

    def take(self, index: int) -> None:
        """Add a node.

        Raises:
            NotTiled: it cannot be tiled; nothing has changed then.
        """
        node = self._nodes[index]
        try:
            self._take(index, node)
        except NotTiled as error:
            unit = self._unit_at(index)
            raise NotTiled(
                f"tiling ends in layer {unit.name} at {node.name} ({node.operator}): {error}"
            ) from None

    def _take(self, index: int, node: GraphNode) -> None:
        if not node.operator.startswith("aten."):
            raise NotTiled("it computes with sizes")
        if self._counts(node):
            self._counters.append(index)
            return
        arguments = arguments_of(node)
        function = elementwise_function(node.operator)
        if draws_random_numbers(node):
            raise NotTiled("its random numbers are drawn for the whole map at once")
        if any(isinstance(reference, TargetRef) for reference in node.references()):
            raise NotTiled("it computes with the target")
        if function in IDENTITIES:
            self._map_of[NodeRef(index)] = self._map(arguments.get("input", arguments.get("self")))
        elif function in CASTS:
            self._cast(index, arguments)
        elif node.operator in CONVOLUTIONS:
            self._convolution(index, arguments)
        elif node.operator in POOLINGS:
            self._pooling(index, function, arguments)
        elif node.operator in PADDINGS:
            self._padding(index, node, arguments)
        elif node.operator == "aten.batch_norm.default":
            self._normalisation(index, arguments)
        elif node.operator == "aten.cat.default":
            self._concatenation(index, arguments)
        elif function in UNARY | BINARY:
            self._elementwise(index, function)
        else:
            raise NotTiled("it is no operator that works on tiles")

    def _counts(self, node: GraphNode) -> bool:
        """Whether it adds a number to a buffer that no map depends on: `num_batches_tracked`."""
        return (
            node.operator in _COUNTERS
            and isinstance(node.args[0], StateRef)
            and all(isinstance(argument, int | float) for argument in node.args[1:])
            and not node.kwargs
        )

    def _cast(self, index: int, arguments: Mapping[str, Any]) -> None:
        """`x.float()` and `x.to(device)` where x is what they ask for already."""
        read, other = self._map(arguments["self"]), arguments.get("other")
        dtype = arguments.get("dtype") if other is None else self._dtype_of(other)
        if dtype not in (None, self._dtype):
            raise NotTiled(f"it casts maps of {self._dtype} to {dtype}")
        if arguments.get("copy") or arguments.get("memory_format") is not None:
            self._elementwise(index, "to")
        else:
            self._map_of[NodeRef(index)] = read

    def _convolution(self, index: int, arguments: Mapping[str, Any]) -> None:
        read = self._map(arguments["input"])
        weight = self._tensor(arguments["weight"], "filters")
        if arguments["bias"] is not None:
            self._tensor(arguments["bias"], "bias")
        if len(weight) != 4:
            raise NotTiled("its filters are not two-dimensional")
        windows = convolution_windows(arguments, (weight[2], weight[3]))
        flops = 2.0 * math.prod(weight)
        self._add(index, (read,), windows, channels=weight[0], flops=flops)

    def _pooling(self, index: int, function: str, arguments: Mapping[str, Any]) -> None:
        read = self._map(arguments["self"])
        windows = pooling_windows(arguments)
        flops = float(self._maps[read].channels * windows[0].kernel * windows[1].kernel)
        ceil_mode = bool(arguments["ceil_mode"])
        self._add(index, (read,), windows, flops=flops, ceil_mode=ceil_mode)

    def _padding(self, index: int, node: GraphNode, arguments: Mapping[str, Any]) -> None:
        self._add(index, (self._map(arguments["self"]),), padding_windows(node, arguments))

    def _normalisation(self, index: int, arguments: Mapping[str, Any]) -> None:
        read = self._map(arguments["input"])
        for name in ("weight", "bias"):
            if arguments[name] is not None:
                self._tensor(arguments[name], name)
        for name in ("running_mean", "running_var"):
            if not isinstance(arguments[name], StateRef | None):
                raise NotTiled(f"its {name} is computed from other values")
        if not isinstance(arguments["momentum"], int | float):
            raise NotTiled("its momentum changes from step to step")
        statistics = uses_batch_statistics(self._nodes[index])
        self._add(index, (read,), _PLAIN, statistics=statistics, flops_per_channel=4.0)

    def _concatenation(self, index: int, arguments: Mapping[str, Any]) -> None:
        if arguments["dim"] not in (1, -3):
            raise NotTiled("it does not join channels")
        reads = tuple(self._map(value) for value in arguments["tensors"])
        self._same_size(reads)
        channels = sum(self._maps[read].channels for read in reads)
        self._add(index, reads, _PLAIN, channels=channels)

    def _elementwise(self, index: int, function: str) -> None:
        node = self._nodes[index]
        references = list(node.references())
        reads = tuple(dict.fromkeys(self._map(r) for r in references if not _is_state(r)))
        if not reads or (function in UNARY and len(reads) != 1):
            raise NotTiled("it does not compute with maps alone")
        if is_in_place(node.operator):
            first = node.args[0]
            if _is_state(first) or self._map(first) in self._shared:
                raise NotTiled("it writes to a tensor that others may share")
            if self._map(first) in self._entering:
                raise NotTiled("it writes to the model's input")
            if not node.grad_enabled:  # what is written keeps its gradient; another map has none
                raise NotTiled("it writes under torch.no_grad()")
            if not is_allowed(out_of_place(node.operator)):
                raise NotTiled("it has no form that leaves its argument alone")
        if not node.grad_enabled and function in MAY_ALIAS - {"detach"}:
            raise NotTiled("it may give back its argument, with its gradient, in torch.no_grad()")
        self._same_size(reads)
        channels = max(self._maps[read].channels for read in reads)
        for reference in references:
            if isinstance(reference, StateRef):
                channels = max(channels, self._channels_of_state(reference, function))
        self._add(index, reads, _PLAIN, channels=channels, flops_per_channel=1.0)
        if function in MAY_ALIAS:
            self._shared |= {*reads, self._map_of[NodeRef(index)]}

    # -- what a node reads -----------------------------------------------------------------------

    def _map(self, value: object) -> int:
        """The number of the map that a reference stands for at present."""
        if isinstance(value, InputRef) and value not in self._map_of:
            self._enter(value)
        if isinstance(value, InputRef | NodeRef) and value in self._map_of:
            return self._map_of[value]
        raise NotTiled("it does not compute with maps alone")

    def _enter(self, leaf: InputRef) -> None:
        described = self._description.inputs[leaf.index]
        shape = map_shape(described)
        if shape is None or not described.dtype.is_floating_point:
            raise NotTiled(f"{described.name} is no batch of images of floating-point numbers")
        if self._itemsize not in (0, described.dtype.itemsize):
            raise NotTiled("images of two element types come together")
        self._itemsize, self._dtype = described.dtype.itemsize, described.dtype
        number = len(self._maps)
        self._maps.append(FeatureMap(described.name, *shape, differentiable=False))
        self._map_of[leaf] = number
        self._entering[number] = leaf.index

    def _dtype_of(self, value: object) -> torch.dtype | None:
        if isinstance(value, StateRef):
            return self._description.tensors_by_name[value.name].dtype
        self._map(value)
        return self._dtype

    def _tensor(self, value: object, what: str) -> tuple[int, ...]:
        """The shape of a tensor of the model's state."""
        if not isinstance(value, StateRef):
            raise NotTiled(f"its {what} are computed from other values")
        tensor = self._description.tensors_by_name[value.name]
        if value.name in self._written:
            raise NotTiled(f"{value.name} changes while the model runs")
        if self._itemsize and tensor.dtype.itemsize != self._itemsize:
            raise NotTiled(f"its {what} have another element type than the images")
        return tensor.shape

    def _same_size(self, reads: tuple[int, ...]) -> None:
        sizes = {(self._maps[read].height, self._maps[read].width) for read in reads}
        if len(sizes) != 1:
            raise NotTiled("it spreads one map over the positions of another")

    def _channels_of_state(self, reference: StateRef, function: str) -> int:
        """Channels of a state tensor in an element-wise operator.

        Raises:
            NotTiled: it differs from position to position.
        """
        shape = self._tensor(reference, "numbers")
        if function == "prelu":
            return 1
        if len(shape) > 4 or any(size != 1 for size in shape[-2:]):
            raise NotTiled(f"{reference.name} differs from position to position")
        return shape[-3] if len(shape) > 2 else 1

    # -- what it makes ---------------------------------------------------------------------------

    def _add(
        self,
        index: int,
        reads: tuple[int, ...],
        windows: Windows,
        *,
        channels: int | None = None,
        statistics: bool = False,
        ceil_mode: bool = False,
        flops: float | None = None,
        flops_per_channel: float = 0.0,
    ) -> None:
        node, source = self._nodes[index], self._maps[reads[0]]
        height = windows[0].outputs(source.height, ceil_mode=ceil_mode)
        width = windows[1].outputs(source.width, ceil_mode=ceil_mode)
        if height < 1 or width < 1:
            raise NotTiled(f"its window does not fit a map of {source.height} x {source.width}")
        made = FeatureMap(
            node.name,
            source.channels if channels is None else channels,
            height,
            width,
            differentiable=self._is_differentiable(node, reads),
        )
        number = len(self._maps)
        self._maps.append(made)
        work = flops_per_channel * made.channels if flops is None else flops
        operation = Operation(node.name, reads, number, *windows, statistics, work)
        named = {r: self._map_of[r] for r in node.references() if r in self._map_of}
        self._made.append(_ReadOperation(index, operation, named))
        self._map_of[NodeRef(index)] = number
        if is_in_place(node.operator):
            written = self._map_of[next(node.references())]
            for reference, known in self._map_of.items():
                if known == written:
                    self._map_of[reference] = number

    def _is_differentiable(self, node: GraphNode, reads: tuple[int, ...]) -> bool:
        if (
            not node.grad_enabled
            or self._mode != "train"
            or elementwise_function(node.operator) == "detach"
        ):
            return False
        by_name = self._description.tensors_by_name
        state = (r.name for r in node.references() if isinstance(r, StateRef))
        return any(self._maps[read].differentiable for read in reads) or any(
            by_name[name].trainable for name in state
        )

    # -- the result ------------------------------------------------------------------------------

    def _unit_at(self, index: int) -> UnitDescription:
        return next(u for u in self._description.units if index < u.nodes(self._mode)[1])

    def finish(self, stop: int, refusal: str | None) -> TiledPart:
        """What nodes [0, stop) make, but for a unit without any map that one might end with.

        Raises:
            NotTiled: they make no map at all.
        """
        stop = self._behind_maps(stop)
        made = [entry for entry in self._made if entry.node < stop]
        if not made:
            raise NotTiled(refusal or "the model has no operator")
        leaving = self._leaving(stop)
        units, counters = [], []
        for unit in self._description.units:
            first, end = unit.nodes(self._mode)
            if first >= stop:
                break
            begin, behind = (sum(entry.node < limit for entry in made) for limit in (first, end))
            sizes = self._parameter_bytes(first, min(end, stop))
            units.append(MapUnit(unit.name, begin, behind, *sizes))
            counters.append(tuple(k for k in self._counters if first <= k < min(end, stop)))
        count = 1 + max(entry.operation.output for entry in made)
        entering = {n: leaf for n, leaf in self._entering.items() if n < count}
        network = MapNetwork(
            maps=tuple(self._maps[:count]),
            operations=tuple(entry.operation for entry in made),
            units=tuple(units),
            entering=tuple(entering),
            leaving=tuple(sorted({*leaving.values()})),
            itemsize=self._itemsize,
        )
        last = self._description.units[len(units) - 1].nodes(self._mode)[1]
        return TiledPart(
            mode=self._mode,
            network=network,
            nodes=tuple(entry.node for entry in made),
            reads=tuple(entry.reads for entry in made),
            counters=tuple(counters),
            entering=tuple(entering.values()),
            leaving=tuple(leaving.items()),
            stop=stop,
            whole=len(units) - (stop < last),
            reason=refusal,
        )

    def _behind_maps(self, stop: int) -> int:
        """The last position up to `stop` in front of which every unit makes a map."""
        for unit in self._description.units:
            first, end = unit.nodes(self._mode)
            if first < stop and not any(first <= one.node < min(end, stop) for one in self._made):
                return first  # it only counts, say
        return stop

    def _leaving(self, stop: int) -> dict[NodeRef, int]:
        """Values that are read behind `stop`, or are the graph's outputs -> their maps."""
        graph = self._description.graph(self._mode)
        later = {r for node in graph.nodes[stop:] for r in node.references()}
        values = {r for r in (*later, *graph.outputs) if isinstance(r, NodeRef) and r.index < stop}
        return {
            value: self._map_of[value]
            for value in sorted(values, key=lambda value: value.index)
            if value in self._map_of
        }

    def _parameter_bytes(self, first: int, end: int) -> tuple[int, int]:
        """(of all parameters, of the frozen ones)."""
        by_name = self._description.tensors_by_name
        used = {
            by_name[reference.name]
            for node in self._nodes[first:end]
            for reference in node.references()
            if isinstance(reference, StateRef)
        }
        parameters = [tensor for tensor in used if tensor.kind is TensorKind.PARAMETER]
        frozen = [tensor for tensor in parameters if not tensor.trainable]
        return sum(t.nbytes for t in parameters), sum(t.nbytes for t in frozen)


def _is_state(value: object) -> bool:
    return isinstance(value, StateRef)
