"""How few samples a model can compute with.

torch.export looks at two samples or more, but `.squeeze()`, which drops a batch of one too, or a
loss over the hardest eight, needs more, and the graph alone does not show it. So graphs are tried
with tensors that have shapes and no content.

Plain torch also refuses to train BatchNorm on one value a channel. That check stands outside the
operators that travel, and their running variance would silently become NaN; so it is read off the
graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.capture.trial_runs import silence_torch_logs
from p2ptrain.model.graph.nodes import GraphNode, InputRef, Reference, TargetRef
from p2ptrain.model.stage.instructions import Registers, allocate, bind

MAX_BATCH = 256
"""Samples up to which is searched: what needs more cannot be exported either."""

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    NotImplementedError,
)
"""What depends on content, or is not known of tensors without: it shows nothing."""

_REFUSED = (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError)
"""What operators raise where they cannot compute."""


def min_batch(graph: Translated) -> int:
    """The fewest samples of which every value has the shape that the graph says.

    1 where no number does: whatever fails then, the number of samples is not why.
    """
    too_few, samples = 0, 1
    while not _computes(graph, samples):
        if samples == MAX_BATCH:
            return 1
        too_few, samples = samples, 2 * samples
    while samples - too_few > 1:
        middle = (too_few + samples) // 2
        too_few, samples = (too_few, middle) if _computes(graph, middle) else (middle, samples)
    return samples


def _computes(graph: Translated, samples: int) -> bool:
    try:
        with silence_torch_logs(), FakeTensorMode(), torch.no_grad():
            return _Trial(graph, samples).agrees()
    except _DATA_DEPENDENT:
        return True
    except _REFUSED:
        return False


class _Trial:
    """One pass through a graph."""

    def __init__(self, graph: Translated, samples: int) -> None:
        self._graph = graph
        self._sizes = (samples, *graph.batch.lengths)

    def agrees(self) -> bool:
        """Whether all shapes are the graph's; raises what operators raise."""
        entering = dict(self._entering())
        places = allocate(self._graph.nodes, 0, entering)
        registers: Registers = [entering.get(reference) for reference in places]
        for index, node in enumerate(self._graph.nodes):
            bound = bind(node, index, places, self._sizes, ())
            bound.run(registers)
            if not self._has_shape(registers[bound.result], self._graph.traced[index].value):
                return False
        return True

    def _entering(self) -> Iterator[tuple[Reference, Tensor]]:
        for index, tensor in enumerate(self._graph.inputs):
            yield InputRef(index), self._made(tensor)
        for index, tensor in enumerate(self._graph.targets):
            yield TargetRef(index), self._made(tensor)
        for reference, tensor in self._graph.state.items():
            yield reference, self._made(tensor)

    def _made(self, tensor: Tensor) -> Tensor:
        sizes = [self._size(size) for size in tensor.shape]
        return torch.empty([size or 0 for size in sizes], dtype=tensor.dtype)

    def _size(self, size: int | torch.SymInt) -> int | None:
        polynomial = self._graph.batch.polynomial(size)
        return None if polynomial is None else polynomial(*self._sizes)

    def _has_shape(self, value: Any, traced: Any) -> bool:
        """What is no tensor, and sizes that do not follow from the batch's, count as alike."""
        if isinstance(value, tuple | list) and isinstance(traced, tuple | list):
            pairs = zip(value, traced, strict=False)
            return len(value) == len(traced) and all(self._has_shape(*pair) for pair in pairs)
        if not isinstance(value, Tensor) or not isinstance(traced, Tensor):
            return True
        if value.dim() != traced.dim():
            return False
        sizes = [self._size(size) for size in traced.shape]
        return all(k is None or k == n for k, n in zip(sizes, value.shape, strict=True))


_BATCH_NORMS = ("batch_norm", "native_batch_norm")

_TRAINING = 5
"""Which of their arguments says that the batch's own statistics count."""


def refuses_one_sample(train: Translated) -> bool:
    """Whether a normalisation of the training graph would get one value for a channel."""
    return any(_normalises_one(train, node) for node in train.nodes)


def _normalises_one(graph: Translated, node: GraphNode) -> bool:
    function = node.operator.split(".")[1]
    if function in _BATCH_NORMS and node.args[_TRAINING]:
        shape = _shape_of_one(graph, node)
        return shape is not None and shape[0] * prod(shape[2:]) == 1
    if function == "group_norm":
        shape, groups = _shape_of_one(graph, node), node.args[1]
        assert isinstance(groups, int)
        return shape is not None and shape[0] * shape[1] // groups * prod(shape[2:]) == 1
    return False


def _shape_of_one(graph: Translated, node: GraphNode) -> list[int] | None:
    """The shape of a node's first argument for a batch of one; None where it is not known."""
    value = graph.value_of(node.args[0])
    if not isinstance(value, Tensor):
        return None
    sizes = [graph.batch.polynomial(size) for size in value.shape]
    one = (1, *graph.batch.lengths)
    return None if None in sizes else [size(*one) for size in sizes if size is not None]
