"""Choosing the units: runs of nodes between narrow cuts, that the planners place as a whole.

1. One cut between each two neighbouring heavy operators (products with weights), the narrowest;
   among equals where the outermost module ends, and then the last.
2. A cut much wider than a neighbouring one goes, where little work is joined by that.
3. Beyond `MAXIMUM_UNITS` the cut goes whose removal joins least work for its width.

Work is estimated before anything is measured: multiplications and additions of the forward's heavy
operators, one multiply-add as two operations, and one operation an element for all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.graph.nodes import NodeRef, Reference, StateRef
from p2ptrain.model.graph.values import Polynomial
from p2ptrain.model.tracing.autograd_graph import tensors_in

MAXIMUM_UNITS = 64
"""More make planning slow (its cost grows with their square or cube) and stages no better."""

_WIDE = 1.5
"""A cut that carries this many times as many bytes as one beside it is wide."""

_MATTERS = 0.2
"""Nodes with less than this part of the largest node's work have no say in a unit's name."""

_LITTLE = 1 / 24
"""A unit with less than this share of all work is little."""


@dataclass(frozen=True, slots=True)
class Landscape:
    """A graph, reduced to what matters for choosing cuts.

    Attributes:
        work: operations of each node.
        heavy: for each node, whether a unit may consist of it alone.
        modules: path of the user's module of each node.
        widths: position of each possible cut -> bytes a sample that cross there.
    """

    work: Sequence[float]
    heavy: Sequence[bool]
    modules: Sequence[str]
    widths: Mapping[int, float]


def choose_cuts(landscape: Landscape) -> list[int]:
    """Positions of the cuts between units, ascending; at most `MAXIMUM_UNITS` - 1."""
    cuts = _between_heavy(landscape)
    cuts = _without_wide(cuts, landscape)
    return _at_most(cuts, landscape, MAXIMUM_UNITS - 1)


def _between_heavy(landscape: Landscape) -> list[int]:
    heavy = [index for index, is_heavy in enumerate(landscape.heavy) if is_heavy]
    cuts = []
    for before, after in pairwise(heavy):
        positions = [p for p in range(before + 1, after + 1) if p in landscape.widths]
        if positions:
            cuts.append(min(positions, key=lambda p: _preference(p, landscape)))
    return cuts


def _preference(position: int, landscape: Landscape) -> tuple[float, int, int]:
    shared = common_path(landscape.modules[position - 1 : position + 1])
    depth = len(shared.split(".")) if shared else 0
    return landscape.widths[position], depth, -position


def _without_wide(cuts: list[int], landscape: Landscape) -> list[int]:
    kept = list(cuts)
    little = sum(landscape.work) * _LITTLE
    for cut in sorted(cuts, key=lambda p: -landscape.widths[p]):
        place = kept.index(cut)
        neighbours = kept[max(place - 1, 0) : place] + kept[place + 1 : place + 2]
        narrowest = min((landscape.widths[p] for p in neighbours), default=float("inf"))
        if landscape.widths[cut] > _WIDE * narrowest and _joined(kept, place, landscape) <= little:
            kept.remove(cut)
    return kept


def _at_most(cuts: list[int], landscape: Landscape, most: int) -> list[int]:
    kept = list(cuts)
    while len(kept) > most:
        worst = min(
            range(len(kept)),
            key=lambda k: _joined(kept, k, landscape) / (landscape.widths[kept[k]] + 1.0),
        )
        del kept[worst]
    return kept


def _joined(cuts: Sequence[int], place: int, landscape: Landscape) -> float:
    """Work of the unit that would stand where cut number `place` now separates two."""
    first = cuts[place - 1] if place else 0
    end = cuts[place + 1] if place + 1 < len(cuts) else len(landscape.work)
    return sum(landscape.work[first:end])


def unit_names(cuts: Sequence[int], landscape: Landscape) -> list[str]:
    """A name for each unit: the innermost module that holds its work, made unique."""
    names: list[str] = []
    for first, end in pairwise([0, *cuts, len(landscape.work)]):
        most = max(landscape.work[first:end], default=0.0)
        working = [k for k in range(first, end) if landscape.work[k] >= most * _MATTERS]
        paths = [landscape.modules[k] for k in working if landscape.modules[k]]
        name = common_path(paths) or (paths[0] if paths else "model")
        names.append(_unique(name, names))
    return names


def common_path(paths: Sequence[str]) -> str:
    """The longest dotted prefix of all paths; "" where there is none."""
    if not paths:
        return ""
    first, last = min(paths).split("."), max(paths).split(".")
    shared = [a for a, b in zip(first, last, strict=False) if a == b]
    prefix = first[: len(shared)]
    while prefix and not all((path + ".").startswith(".".join(prefix) + ".") for path in paths):
        prefix.pop()
    return ".".join(prefix)


def _unique(name: str, taken: Sequence[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}#{number}", number + 1
    return candidate


_MATRIX_PRODUCTS = frozenset({"mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm", "mv"})

_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})

_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

_OTHERS = frozenset(
    {
        *("linear", "bilinear", "embedding", "embedding_bag", "einsum", "_grouped_mm"),
        "scaled_dot_product_attention",
    }
)


def node_flops(graph: Translated, arguments: Sequence[Any], index: int, batch: int) -> float:
    """Operations of one node for `batch` samples.

    Args:
        graph: where the node is.
        arguments: what tracing gave for each positional argument (None where it is no tensor).
        index: of the node.
        batch: how many samples to count for.
    """
    node = graph.nodes[index]
    results = tensors_in(graph.traced[index].value)
    if not results:
        return 0.0
    size = _Size(graph, batch)
    elements = sum(size.elements(tensor) for tensor in results)
    function = node.operator.split(".")[1].rstrip("_")
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    if len(tensors) < 2:
        return elements
    return elements * _operations_per_element(function, tensors, size, elements)


def heavy_nodes(graph: Translated) -> list[bool]:
    """Of each node, whether it is a product with weights, as each unit has one."""
    from_state = _from_state(graph)
    return [
        _is_heavy(node.operator.split(".")[1].rstrip("_"))
        and not from_state.isdisjoint(node.references())
        for node in graph.nodes
    ]


def _from_state(graph: Translated) -> frozenset[Reference]:
    """State, and nodes that compute with nothing but state: transposed or normalised weights."""
    found: set[Reference] = set()
    for index, node in enumerate(graph.nodes):
        references = list(node.references())
        found.update(r for r in references if isinstance(r, StateRef))
        if references and all(reference in found for reference in references):
            found.add(NodeRef(index))
    return frozenset(found)


def _is_heavy(function: str) -> bool:
    """Whether an operator of that name does its work per element many times over."""
    return function in (_MATRIX_PRODUCTS | _CONVOLUTIONS | _TRANSPOSED | _RECURRENT | _OTHERS)


def _operations_per_element(
    function: str, tensors: Sequence[Tensor], size: _Size, elements: float
) -> float:
    if function in ("linear", "_grouped_mm"):
        return 2.0 * size.dimension(tensors[0], -1)
    if function in _MATRIX_PRODUCTS:
        return 2.0 * size.dimension(tensors[-2], -1)
    if function in _CONVOLUTIONS:
        return 2.0 * math.prod(size.dimension(tensors[1], d) for d in range(1, tensors[1].dim()))
    if function in _TRANSPOSED:
        weight, image = tensors[1], tensors[0]
        return 2.0 * size.elements(image) * size.elements(weight) / weight.shape[0] / elements
    if function in _RECURRENT:
        return 8.0 * (size.dimension(tensors[0], -1) + size.dimension(tensors[1], -1))
    if function == "bilinear":
        return 2.0 * size.dimension(tensors[0], -1) * size.dimension(tensors[1], -1)
    if function == "scaled_dot_product_attention":
        return 4.0 * size.dimension(tensors[1], -2)
    return 1.0


class _Size:
    """Sizes of traced tensors as numbers, for a batch."""

    def __init__(self, graph: Translated, batch: int) -> None:
        self._polynomial = graph.batch.polynomial
        self._sizes = (batch, *graph.batch.lengths)

    def dimension(self, tensor: Tensor, dimension: int) -> int:
        """One size; 1 where it is known only once the values are."""
        polynomial: Polynomial | None = self._polynomial(tensor.shape[dimension])
        return polynomial(*self._sizes) if polynomial is not None else 1

    def elements(self, tensor: Tensor) -> float:
        """All of them multiplied."""
        return float(math.prod(self.dimension(tensor, d) for d in range(tensor.dim())))
