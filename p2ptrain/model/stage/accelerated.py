"""What an accelerator computes in another way than the processor.

Random numbers are drawn on the host, by the one generator that all devices have: a unit gets the
same masks wherever it runs, and a stage may move between devices of different kinds. Dropout needs
the shape alone from the accelerator, so that only the mask travels; of other operators that draw,
the arguments do.

    host      noise = dropout(1, 1, ...) ---+
    device    input ------------------------+--> input * noise
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

_DROPOUT = "aten.dropout.default"

_ATTENTION = "aten.scaled_dot_product_attention.default"


def call_on(device: ComputeDevice, node: GraphNode) -> Callable[..., Any]:
    """What computes a node on an accelerator."""
    call = call_of(node)
    if not draws_random_numbers(node):
        return call
    if node.operator == _DROPOUT:
        return lambda tensor, p, train: tensor * _noise(device, tensor, p)
    if node.operator == _ATTENTION:
        return _Attention(device)
    return _OnHost(device, call, resolve(node.operator).mutates)


def _noise(device: ComputeDevice, tensor: Tensor, p: float) -> Tensor:
    """What dropout multiplies a tensor with: 0, or 1 / (1 - p)."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    ones = torch.empty_strided(shape, strides, dtype=tensor.dtype).fill_(1)
    with torch.no_grad():
        return device.copy_in(torch.ops.aten.dropout.default(ones, p, True))


class _Attention:
    """Attention with dropout, by the steps of the processor."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """(..., queries, wide), (..., keys, wide), (..., keys, out) -> (..., queries, out)."""
        shape = (*query.shape[:-1], key.shape[-2])
        ones = torch.ones(shape, dtype=query.dtype)
        with torch.no_grad():
            drawn = torch.ops.aten.dropout.default(ones, dropout_p, True) != 0
        kept = self._device.copy_in(drawn)
        result: Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(
            *(query, key, value, attn_mask, dropout_p, is_causal, kept),
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
        return result


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
