"""Operators of ATen's that trust some of their arguments: looked at before they run.

A received model may hold any numbers. These kernels compute addresses from lengths, sizes or random
samples, and check them not at all or only when asked to (`unsafe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from p2ptrain.model.graph.packed_sequences import are_made_up, checked_recurrent

EXPECT = "aten._assert_async.msg"

UNLIKE = "unlike the first samples: "
"""How a text of `EXPECT` begins."""

MAX_BINS = 1 << 16
"""Classes that are counted without a number of them."""

_ROUNDED = 1e-3
"""Of a size."""

_FAR = 1e6
"""From a picture, whose sides lie at -1 and 1: farther places are computed wrongly in float32."""


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


def _of_finite(name: str) -> Callable[..., Any]:
    """ATen's, for finite matrices: the library below it reads beyond others. IndexError: others."""
    computes = _aten(name)

    def checked(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not bool(self.detach().isfinite().all()):
            raise IndexError("the eigenvalues of a matrix that is not finite were asked for")
        return computes(self, *args, **kwargs)

    return checked


def lu_unpack(
    LU_data: Tensor,
    LU_pivots: Tensor,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's, for a pivot a row; IndexError: others."""
    wanted = (*LU_data.shape[:-2], min(LU_data.shape[-2:], default=0))
    if LU_data.dim() < 2 or tuple(LU_pivots.shape) != wanted:
        raise IndexError("a factorised matrix has other pivots than it has rows")
    result: tuple[Tensor, Tensor, Tensor] = _aten("lu_unpack")(
        LU_data, LU_pivots, unpack_data, unpack_pivots
    )
    return result


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """ATen's, for one length a slice of `v` along a dimension; IndexError: others.

    Args:
        v: of one dimension at least, floating point.
        g: a length for each slice, in as many dimensions as `v`, of the same type.
        dim: from 0; -1: one length for all of `v`.
    """
    sizes = tuple(size if d == dim else 1 for d, size in enumerate(v.shape)) if dim != -1 else ()
    fits = -1 <= dim < v.dim() and tuple(g.shape) == sizes and v.dtype == g.dtype
    if not fits or not v.dim() or not v.is_floating_point() or not v.numel():
        raise IndexError("a weight norm has another length than its weight has slices")
    result: Tensor = _aten("_weight_norm")(v, g, dim)
    return result


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ATen's, for bags that lie in `indices` and words that are in the table.

    Raises:
        IndexError: others, or sums whose weights are not one a word.
    """
    words, ends = indices, offsets
    fits = weight.dim() == 2 and words.dim() == ends.dim() == 1 and mode in (0, 1, 2)
    fits = fits and words.dtype == ends.dtype and words.dtype in (torch.int32, torch.int64)
    fits = fits and weight.is_floating_point() and weight.numel() > 0 and ends.numel() > 0
    fits = fits and ends.numel() > include_last_offset  # else there is no bag
    if per_sample_weights is not None:
        fits = fits and per_sample_weights.shape == words.shape
        fits = fits and per_sample_weights.dtype == weight.dtype and mode == 0
    if not fits:
        raise IndexError("bags of words, their borders or weights are of other shapes or types")
    inside = bool(((words >= 0) & (words < weight.shape[0])).all())
    ascending = bool((ends.diff() >= 0).all()) and int(ends[0]) == 0
    if not inside or not ascending or int(ends[-1]) > words.numel():
        raise IndexError("a word is not in the table, or a bag not in its words")
    if padding_idx is None:
        bags = _aten("embedding_bag")
        rest: tuple[Any, ...] = (per_sample_weights, include_last_offset)
    else:
        bags = torch.ops.aten.embedding_bag.padding_idx
        rest = (per_sample_weights, include_last_offset, padding_idx)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = bags(
        weight, indices, offsets, scale_grad_by_freq, mode, sparse, *rest
    )
    return result


def _numbers(given: Any) -> list[int]:
    """Of a list, or of a tensor with one dimension."""
    if not isinstance(given, Tensor):
        return [*given]
    whole = given.dim() == 1 and not given.is_floating_point() and not given.is_complex()
    return [int(number) for number in given.tolist()] if whole else []


def _ctc_loss(overload: str) -> Callable[..., Tensor]:
    """ATen's, for labels and lengths that are there; IndexError: others."""
    computes = getattr(torch.ops.aten.ctc_loss, overload)

    def checked(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *rest: Any
    ) -> Tensor:
        of_steps, of_labels = _numbers(input_lengths), _numbers(target_lengths)
        steps, classes = log_probs.shape[0] if log_probs.dim() else 0, log_probs.shape[-1:]
        samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
        fits = log_probs.dim() in (2, 3) and targets.dim() in (1, 2)
        fits = fits and targets.dtype in (torch.int32, torch.int64) and steps > 0
        if not fits or len(of_steps) != samples or len(of_labels) != samples:
            raise IndexError("a CTC loss gets other lengths than it has samples")
        room = targets.shape[-1]
        together = targets.dim() == 1 and log_probs.dim() == 3
        inside = all(0 <= n <= steps for n in of_steps) and all(0 <= n <= room for n in of_labels)
        inside = inside and (not together or sum(of_labels) == room)
        inside = inside and (together or targets.dim() == 1 or targets.shape[0] == samples)
        labels = bool(((targets >= 0) & (targets < classes[0])).all())
        if not inside or not labels or not (not rest or 0 <= rest[0] < classes[0]):
            raise IndexError("a label of a CTC loss is no class, or is not there")
        result: Tensor = computes(log_probs, targets, input_lengths, target_lengths, *rest)
        return result

    return checked


def _grid_sampler(name: str) -> Callable[..., Tensor]:
    """ATen's, for a way to look beyond borders that there is, and places that are numbers."""
    computes = _aten(name)

    def checked(input: Tensor, grid: Tensor, mode: int, padding: int, corners: bool) -> Tensor:
        if mode not in (0, 1, 2) or padding not in (0, 1, 2):
            raise IndexError("a grid is sampled in a way that there is not")
        if not bool((grid.detach().abs() < _FAR).all()):
            raise IndexError("a grid is sampled at places that are nowhere")
        result: Tensor = computes(input, grid, mode, padding, corners)
        return result

    return checked


def _upsample(overload: OpOverload) -> Callable[..., Tensor]:
    """ATen's, for scales by which a picture has the size that is asked for; IndexError: others.

    The kernels look at the places of a picture that the scales lead to, inside it or not.
    """
    names = [argument.name for argument in overload._schema.arguments]

    def checked(picture: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        scales = [given.get(name) for name in names if name.startswith("scales")]
        for side, size, scale in zip(
            picture.shape[2:], given["output_size"] or (), scales, strict=False
        ):
            if scale is not None and size > side * scale + _ROUNDED:
                raise IndexError("a picture gets another size than its scale makes it")
        result: Tensor = overload(picture, *args, **kwargs)
        return result

    return checked


def refuse_no_heads(query: Tensor, key: Tensor) -> None:
    """Raises IndexError: there are no heads, of which attention makes groups, or no samples."""
    if key.dim() < 2 or query.dim() < 2 or 0 in (*key.shape[:-2], *query.shape[:-2]):
        raise IndexError("an attention has no heads, or no samples")


def attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """ATen's, for keys that have heads; IndexError: others."""
    refuse_no_heads(query, key)
    result: Tensor = _aten("scaled_dot_product_attention")(query, key, *args, **kwargs)
    return result


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """ATen's, for classes below `minlength`, or below MAX_BINS where that is not given.

    Raises:
        IndexError: there are others.
    """
    if self.numel() and int(self.max()) >= (minlength or MAX_BINS):
        raise IndexError("bincount finds classes beyond minlength")
    result: Tensor = _aten("bincount")(self, weights, minlength)
    return result


def _aten(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


_SCALED = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *(f"_upsample_nearest_exact{dimensions}d" for dimensions in (1, 2, 3)),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)


def expect(condition: Tensor, text: str) -> None:
    """Raise `text`, as a `RuntimeError`, unless `condition` (one element) is true.

    ATen's own ends the process on an accelerator. Made-up values say nothing.
    """
    if not condition.is_meta and not are_made_up() and not bool(condition):
        raise RuntimeError(text)


CHECKED: Mapping[str, Callable[..., Any]] = {
    EXPECT: expect,
    **{
        f"aten.{name}.{kind}": checked_recurrent(name, gates, states, kind == "data")
        for name, gates, states in (
            ("lstm", 4, 2),
            ("gru", 3, 1),
            ("rnn_tanh", 1, 1),
            ("rnn_relu", 1, 1),
        )
        for kind in ("input", "data")
    },
    **{
        f"aten.{name}.default": _upsample(getattr(torch.ops.aten, name).default) for name in _SCALED
    },
    "aten.ctc_loss.Tensor": _ctc_loss("Tensor"),
    "aten.ctc_loss.IntList": _ctc_loss("IntList"),
    "aten.grid_sampler.default": _grid_sampler("grid_sampler"),
    "aten.grid_sampler_2d.default": _grid_sampler("grid_sampler_2d"),
    "aten.grid_sampler_3d.default": _grid_sampler("grid_sampler_3d"),
    "aten._weight_norm.default": weight_norm,
    "aten.lu_unpack.default": lu_unpack,
    "aten.bincount.default": bincount,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.embedding_bag.default": embedding_bag,
    "aten.embedding_bag.padding_idx": embedding_bag,
    "aten.linalg_eig.default": _of_finite("linalg_eig"),
    "aten.linalg_eigvals.default": _of_finite("linalg_eigvals"),
    "aten.segment_reduce.default": segment_reduce,
    "aten.convolution_backward.default": convolution_backward,
    "aten.native_layer_norm_backward.default": native_layer_norm_backward,
    "aten.nll_loss_backward.default": nll_loss_backward,
    "aten._softmax_backward_data.default": _softmax_backward("_softmax_backward_data"),
    "aten._log_softmax_backward_data.default": _softmax_backward("_log_softmax_backward_data"),
    "aten.fractional_max_pool2d.default": _fractional_max_pool(2),
    "aten.fractional_max_pool3d.default": _fractional_max_pool(3),
}
