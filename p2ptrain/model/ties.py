"""Adding up the gradients of a weight that several stages use, in plain torch's order.

Floating-point sums depend on their order. In plain torch the uses of one micro-batch come together
first, the later layers' before the earlier ones', and then the micro-batches:

    ((h0 + e0) + (h1 + e1)) + (h2 + e2)        h: the later stage's part, e: the earlier one's

Summing each stage's own gradients first and then the stages gives other last bits. So where the
gradients of all micro-batches are small enough to be kept apart, they are, and are merged here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def merge(parts: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
    """The sum of all gradients of one tensor, as plain torch's `.grad` would hold it.

    Args:
        parts: for each stage that uses the tensor, ascending, its gradients by micro-batch (as
            `Stage.take_separate` gives them). None counts as nothing.

    Returns:
        The sum, in memory of its own; None where there is no gradient at all.
    """
    total: Tensor | None = None
    for uses in zip(*parts, strict=True):
        gradient: Tensor | None = None
        for part in reversed(uses):
            gradient = _add(gradient, part)
        total = _add(total, gradient)
    return None if total is None else total.clone()


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
