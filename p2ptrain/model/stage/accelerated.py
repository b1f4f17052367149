"""What an accelerator does not compute itself: random numbers.

They are drawn on the host, by the one generator that all devices have: a unit gets the same numbers
wherever it runs, and a stage may move between devices of different kinds. The operator's arguments
travel there, and its result back. Dropout has its own, fast way: `hashed_masks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.model.graph.effects import draws_random_numbers
from p2ptrain.model.graph.nodes import GraphNode
from p2ptrain.model.graph.operators import resolve
from p2ptrain.model.stage.instructions import call_of


def call_on(device: ComputeDevice, node: GraphNode) -> Callable[..., Any]:
    """What computes a node on an accelerator."""
    call = call_of(node)
    if not draws_random_numbers(node):
        return call
    return _OnHost(device, call, resolve(node.operator).mutates)


class _OnHost:
    """An operator computed on the host, with arguments from the accelerator.

    Args:
        mutates: positions of the arguments that it writes to.
    """

    def __init__(
        self, device: ComputeDevice, call: Callable[..., Any], mutates: frozenset[int]
    ) -> None:
        self._device = device
        self._call = call
        self._mutates = mutates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the operator."""
        here = [self._outside(value) for value in args]
        placed = {name: self._outside(value) for name, value in kwargs.items()}
        result = self._call(*here, **placed)
        for position in self._mutates:
            args[position].copy_(self._inside(here[position]))
        return self._inside(result)

    def _outside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Leaving.apply(value, self._device)  # type: ignore[no-untyped-call]
        if isinstance(value, list | tuple):
            return [self._outside(item) for item in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Entering.apply(value, self._device)  # type: ignore[no-untyped-call]
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._inside(item) for item in value]
        return value


class _Leaving(torch.autograd.Function):
    """To the host; the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, device: ComputeDevice) -> Tensor:
        ctx.device = device
        (copy,) = device.fetched([value])
        assert copy is not None
        return copy.clone() if copy is value else copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        inside: Tensor = ctx.device.copy_in(gradients[0])
        return inside, None


class _Entering(torch.autograd.Function):
    """To the device; the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, device: ComputeDevice) -> Tensor:
        ctx.device = device
        copy = device.copy_in(value)
        return copy.clone() if copy is value else copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (copy,) = ctx.device.fetched(gradients)
        return copy, None
