"""How much arithmetic a node does, to weigh units against each other before anything is measured.

Counted are multiplications and additions of the operators that do nearly all the work, forward
only, with the usual convention that one multiply-add is two operations; the rest counts one
operation an element of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from p2ptrain.model.translate import Translated, tensors_in
from p2ptrain.model.values import Polynomial

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


def is_heavy(function: str) -> bool:
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
        self._batch = batch

    def dimension(self, tensor: Tensor, dimension: int) -> int:
        """One size; 1 where it is known only once the values are."""
        polynomial: Polynomial | None = self._polynomial(tensor.shape[dimension])
        return polynomial(self._batch) if polynomial is not None else 1

    def elements(self, tensor: Tensor) -> float:
        """All of them multiplied."""
        return float(math.prod(self.dimension(tensor, d) for d in range(tensor.dim())))
