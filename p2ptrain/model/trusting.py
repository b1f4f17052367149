"""Operators of ATen's that trust some of their arguments: looked at before they run.

A received model may hold any numbers. These kernels compute addresses from lengths, sizes or random
samples, and check them not at all or only when asked to (`unsafe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from p2ptrain.model.packed import are_made_up


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """ATen's, for segments that lie in the data and fill it.

    Args:
        data: (..., n, ...) with n at `axis`.
        lengths: (..., segments), whole numbers that add up to n.
        unsafe: without effect.

    Raises:
        IndexError: the segments do not fit, or are not given by their lengths.
    """
    if lengths is None or indices is not None or offsets is not None:
        raise IndexError("segments are reduced by their lengths only")
    axis %= max(data.dim(), 1)
    if lengths.dim() != axis + 1 or lengths.shape[:-1] != data.shape[:axis]:
        raise IndexError("segments have other lengths than their data has places for")
    if are_made_up():
        lengths = torch.zeros_like(lengths)
        lengths[..., :1] = data.shape[axis]
    inside = bool(((lengths >= 0) & (lengths <= data.shape[axis])).all())  # so no sum overflows
    if not inside or not bool((lengths.sum(-1) == data.shape[axis]).all()):
        raise IndexError("the lengths of segments do not add up to their data")
    reduced = _aten("segment_reduce")
    result: Tensor = reduced(data, reduce, lengths=lengths, axis=axis, initial=initial)
    return result


def _fractional_max_pool(dimensions: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """ATen's, for `random_samples` (batch, channels, dimensions) in [0, 1); IndexError: others."""
    pool = _aten(f"fractional_max_pool{dimensions}d")

    def checked(
        self: Tensor, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Tensor
    ) -> tuple[Tensor, Tensor]:
        sizes = (*kernel_size, *output_size)
        samples = _checked(self, sizes, random_samples, dimensions)
        result: tuple[Tensor, Tensor] = pool(self, kernel_size, output_size, samples)
        return result

    return checked


def _checked(maps: Tensor, sizes: Sequence[int], samples: Tensor, dimensions: int) -> Tensor:
    if min(sizes) < 1 or maps.dim() not in (dimensions + 1, dimensions + 2):
        raise IndexError("the windows of a fractional pooling have no size")
    leading = maps.shape[:-dimensions] if maps.dim() == dimensions + 2 else (1, maps.shape[0])
    if are_made_up():
        samples = torch.zeros_like(samples)
    inside = bool(((samples >= 0) & (samples < 1)).all())
    if samples.shape != (*leading, dimensions) or not inside:
        raise IndexError("the random samples of a fractional pooling do not lie between 0 and 1")
    return samples


def _softmax_backward(name: str) -> Callable[..., Tensor]:
    """ATen's, for tensors of one shape and type; IndexError: others."""
    computes = _aten(name)

    def checked(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        types = {grad_output.dtype, output.dtype, input_dtype}
        if grad_output.shape != output.shape or len(types) != 1:
            raise IndexError("the derivative of a softmax is not of the softmax's shape and type")
        result: Tensor = computes(grad_output, output, dim, input_dtype)
        return result

    return checked


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    *settings: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """ATen's, for the gradient of a result that this convolution has.

    Args:
        settings: stride, padding, dilation, transposed, output_padding, groups, output_mask.

    Raises:
        IndexError: the gradient is of another shape or type.
    """
    maps, filters = (torch.empty_like(tensor, device="meta") for tensor in (input, weight))
    result = _aten("convolution")(maps, filters, None, *settings[:6])
    types = {grad_output.dtype, input.dtype, weight.dtype}
    channels = [grad_output.shape[1]] if grad_output.dim() > 1 else []
    if (
        grad_output.shape != result.shape
        or len(types) != 1
        or (bias_sizes is not None and [*bias_sizes] != channels)
    ):
        raise IndexError("the derivative of a convolution is not of its result's shape and type")
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = _aten("convolution_backward")(
        grad_output, input, weight, bias_sizes, *settings
    )
    return gradients


def native_layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """ATen's, for statistics (..., 1, 1) and weights (...) of this input.

    Raises:
        IndexError: something is of another shape or type.
    """
    shape = tuple(normalized_shape)
    rows = input.shape[: max(input.dim() - len(shape), 0)]
    wanted = [(grad_out, input.shape), *((s, (*rows, *(1 for _ in shape))) for s in (mean, rstd))]
    wanted += [(tensor, shape) for tensor in (weight, bias) if tensor is not None]
    fits = (*rows, *shape) == tuple(input.shape) and all(
        tensor.shape == size and tensor.dtype == input.dtype for tensor, size in wanted
    )
    if not fits:
        raise IndexError("the derivative of a layer norm is not of its input's shape and type")
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = _aten(
        "native_layer_norm_backward"
    )(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)
    return gradients


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """ATen's, for targets that are classes: the loss itself has looked, its derivative does not.

    Args:
        self: (class) or (sample, class).

    Raises:
        IndexError: a target is no class, or something is of another shape or type.
    """
    each = self.shape[:-1]
    shapes = [(grad_output, () if reduction else each), (total_weight, ())]
    shapes += [] if weight is None else [(weight, self.shape[-1:])]
    if (
        self.dim() not in (1, 2)
        or target.shape != each
        or target.dtype not in (torch.int64, torch.uint8)
        or any(part.shape != shape or part.dtype != self.dtype for part, shape in shapes)
    ):
        raise IndexError("the derivative of a loss is not of the loss's shape and type")
    inside = (target >= 0) & (target < self.shape[-1])
    if not bool((inside | (target == ignore_index)).all()):
        raise IndexError("a target of the derivative of a loss is no class")
    gradient: Tensor = _aten("nll_loss_backward")(
        grad_output, self, target, weight, reduction, ignore_index, total_weight
    )
    return gradient


def _aten(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


CHECKED: Mapping[str, Callable[..., Any]] = {
    "aten.segment_reduce.default": segment_reduce,
    "aten.convolution_backward.default": convolution_backward,
    "aten.native_layer_norm_backward.default": native_layer_norm_backward,
    "aten.nll_loss_backward.default": nll_loss_backward,
    "aten._softmax_backward_data.default": _softmax_backward("_softmax_backward_data"),
    "aten._log_softmax_backward_data.default": _softmax_backward("_log_softmax_backward_data"),
    "aten.fractional_max_pool2d.default": _fractional_max_pool(2),
    "aten.fractional_max_pool3d.default": _fractional_max_pool(3),
}
