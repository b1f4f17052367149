"""A segment as autograd recorded it: its values come from outside and its gradients go there.

What enters is no autograd leaf but the result of a node of its own (as in `stage`): a leaf would
keep its memory until the backward, and could not be written to in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from p2ptrain.model.stage.split_backward import WeightGradients


class RecordedSegment:
    """Between a segment's forward and its backward.

    Attributes:
        gradients: of what entered, by map; filled in by `backward`.
        later: gradients of filters, which `backward` leaves out.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """`parameters`: of the segment's operators, as often as they are read; of filters among
        them `backward` leaves the gradients for later."""
        self.gradients: dict[int, Tensor | None] = {}
        self.later = WeightGradients(Counter(map(id, parameters)))
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._anchors: list[Tensor] = []
        self._roots: list[tuple[int, bool, GradientEdge]] = []

    def enter(self, number: int, value: Tensor) -> Tensor:
        """`value` of a map, as autograd sees it inside."""
        self._anchors.append(torch.empty(0, requires_grad=True))
        made: Tensor = _Enter.apply(  # type: ignore[no-untyped-call]
            self._anchors[-1], [value.detach()], self.gradients, number
        )
        return made

    def watch(self, result: Tensor) -> None:
        """A product with filters has just given that."""
        if result.requires_grad:
            self.later.watch(result)

    def leave(self, number: int, value: Tensor, *, owned: bool) -> Tensor:
        """Note where the backward starts; `owned` = from the part that leaves the group.

        Returns:
            The value for outside.
        """
        if value.requires_grad:
            self._roots.append((number, owned, get_gradient_edge(value)))  # without its memory
        return value.detach()

    def backward(
        self, inner: Mapping[int, Tensor], owned: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor | None]:
        """Run it; parameters add to their `.grad`.

        Args:
            inner: gradients that came from later segments, by map.
            owned: gradients of what left the group, by map.

        Returns:
            The gradients of what entered; None or nothing where there is none.
        """
        roots, starts = [], []
        for number, leaves, edge in self._roots:
            gradient = (owned if leaves else inner).get(number)
            if gradient is not None:
                roots.append(edge)
                starts.append(gradient)
        self._roots.clear()
        self.later.settle()
        apart = self.later.parameters
        here = [p for key, p in self._parameters.items() if key not in apart]
        wanted = [*self._anchors, *here]
        if roots and wanted:
            torch.autograd.backward(roots, starts, inputs=wanted)
        return self.gradients


class _Enter(torch.autograd.Function):
    """Gives a value, and keeps its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        value: list[Tensor],
        gradients: dict[int, Tensor | None],
        number: int,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.number = gradients, number
        return value.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.number] = gradients[0]
        return None, None, None, None
