"""Whether plain torch refuses to train a model on one sample, read off its graph.

BatchNorm cannot normalise one value a channel. torch checks that outside the operators that travel,
whose running variance would silently become NaN.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from p2ptrain.model.graph import Node
from p2ptrain.model.translate import Translated

_BATCH_NORMS = ("batch_norm", "native_batch_norm")
_TRAINING = 5
"""Which of their arguments says that the batch's own statistics count."""


def refuses_one_sample(train: Translated) -> bool:
    """Whether a normalisation of the training graph would get one value for a channel."""
    return any(_normalises_one(train, node) for node in train.nodes)


def _normalises_one(graph: Translated, node: Node) -> bool:
    function = node.operator.split(".")[1]
    if function in _BATCH_NORMS and node.args[_TRAINING]:
        shape = _shape_of_one(graph, node)
        return shape is not None and shape[0] * prod(shape[2:]) == 1
    if function == "group_norm":
        shape, groups = _shape_of_one(graph, node), node.args[1]
        assert isinstance(groups, int)
        return shape is not None and shape[0] * shape[1] // groups * prod(shape[2:]) == 1
    return False


def _shape_of_one(graph: Translated, node: Node) -> list[int] | None:
    """The shape of a node's first argument for a batch of one; None where it is not known."""
    value = graph.value_of(node.args[0])
    if not isinstance(value, Tensor):
        return None
    sizes = [graph.batch.polynomial(size) for size in value.shape]
    return None if None in sizes else [size(1) for size in sizes if size is not None]
