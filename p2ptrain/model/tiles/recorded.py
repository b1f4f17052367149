"""A segment as autograd recorded it: its values come from outside and its gradients go there.

What enters is no autograd leaf but the result of a node of its own (as in `stage`): a leaf would
keep its memory until the backward, and could not be written to in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Recorded:
    """Between a segment's forward and its backward.

    Attributes:
        gradients: of what entered, by map; filled in by `backward`.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor | None] = {}
        self._roots: list[tuple[int, bool, Tensor]] = []

    def enter(self, number: int, value: Tensor) -> Tensor:
        """`value` of a map, as autograd sees it inside."""
        made: Tensor = _Enter.apply(  # type: ignore[no-untyped-call]
            torch.empty(0, requires_grad=True), [value.detach()], self.gradients, number
        )
        return made

    def leave(self, number: int, value: Tensor, *, owned: bool) -> Tensor:
        """Note where the backward starts; `owned` = from the part that leaves the group.

        Returns:
            The value for outside.
        """
        if value.requires_grad:
            self._roots.append((number, owned, value))
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
        for number, leaves, value in self._roots:
            gradient = (owned if leaves else inner).get(number)
            if gradient is not None:
                roots.append(value)
                starts.append(gradient)
        self._roots.clear()
        if roots:
            torch.autograd.backward(roots, starts)
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
