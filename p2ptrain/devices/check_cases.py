"""The kinds of computations that an accelerator is checked with before it is used.

Sizes are those at which a wrong kernel shows: several tiles of a matrix, an odd number of columns,
strides that are not a row after the other. A kind names the operators of captured graphs that it
stands for; one without operators is what every training needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Computation: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Of tensors in one memory; results there. Floats among the inputs take gradients."""


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One kind of computation.

    Attributes:
        kind: as users see it.
        operators: names of torch's operators, without "aten." and overload.
        shapes: of the inputs, normally distributed.
        compute: from the inputs.
        labels: for each whole-number input behind them: its shape, and how many values it takes.
        halves: it is checked in bfloat16 too.
    """

    kind: str
    operators: frozenset[str]
    shapes: tuple[tuple[int, ...], ...]
    compute: Computation
    labels: tuple[tuple[tuple[int, ...], int], ...] = ()
    halves: bool = False

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The same on every device and at every time; scaled like activations and weights."""
        generator = torch.Generator().manual_seed(len(self.kind))
        drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in self.shapes]
        whole = [torch.randint(most, shape, generator=generator) for shape, most in self.labels]
        return [*drawn, *whole]


def _case(
    kind: str,
    operators: str,
    shapes: Sequence[tuple[int, ...]],
    compute: Callable[..., Tensor | Sequence[Tensor]],
    *,
    labels: Sequence[tuple[tuple[int, ...], int]] = (),
    halves: bool = False,
) -> CheckCase:
    def listed(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        found = compute(*inputs)
        return [found] if isinstance(found, Tensor) else found

    return CheckCase(
        kind, frozenset(operators.split()), tuple(shapes), listed, tuple(labels), halves
    )


def _copies(a: Tensor) -> Sequence[Tensor]:
    return [a.t().contiguous() + 0.0, a[:, ::3] * 1.0, a.flip(0)]


def _adam(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> Sequence[Tensor]:
    """As torch.optim.Adam after some steps."""
    with torch.no_grad():
        mean = first.lerp(gradient, 0.1)
        square = (second.abs() * 0.999).addcmul(gradient, gradient, value=0.001)
        updated = parameter.addcdiv(mean, (square.sqrt() / 0.03).add(1e-8), value=-1e-3)
    return [updated, mean, square]


def _norms(a: Tensor) -> Sequence[Tensor]:
    """Of all gradients together, and clipping by it."""
    norm = torch.linalg.vector_norm(a)
    return [norm, a * (1.0 / (norm + 1e-6)).clamp(max=1.0), a.sum(), a.mean()]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores: Tensor = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


def _indexing(a: Tensor, rows: Tensor) -> Sequence[Tensor]:
    wide = rows.unsqueeze(1).expand(-1, a.shape[1])
    zeros = torch.zeros_like(a)
    return [a[rows], a.gather(0, wide), zeros.index_add(0, rows, a[rows] * 0.5)]


def _pooling(a: Tensor) -> Sequence[Tensor]:
    return [
        functional.max_pool2d(a, 3, 2, 1),
        functional.avg_pool2d(a, 2),
        functional.adaptive_avg_pool2d(a, 3),
    ]


def _batch_norm(a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.batch_norm(a, None, None, weight, bias, training=True)


def _normed(a: Tensor, weight: Tensor, bias: Tensor) -> Sequence[Tensor]:
    scaled = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-5) * weight
    return [functional.layer_norm(a, a.shape[-1:], weight, bias), scaled]


def _steps(a: Tensor) -> Sequence[Tensor]:
    return [functional.relu(a), functional.leaky_relu(a), torch.tanh(a), torch.sigmoid(a)]


def _elementwise(a: Tensor, b: Tensor) -> Sequence[Tensor]:
    return [a * b + a, torch.exp(-a.abs()), torch.where(a > b, a, b), a / (b.abs() + 1.0)]


def _losses(logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
    smooth = functional.cross_entropy(logits, labels, label_smoothing=0.1)
    return [functional.cross_entropy(logits, labels), smooth, functional.log_softmax(logits, 1)]


def _distances(a: Tensor, b: Tensor) -> Sequence[Tensor]:
    likely = functional.binary_cross_entropy_with_logits(a, b.sigmoid())
    return [functional.mse_loss(a, b), functional.l1_loss(a, b), likely]


def _enlarged(a: Tensor) -> Sequence[Tensor]:
    near = functional.interpolate(a, scale_factor=2, mode="nearest")
    return [near, functional.interpolate(a, size=(21, 19), mode="bilinear")]


CASES: tuple[CheckCase, ...] = (
    _case("copies", "", [(67, 130)], _copies),
    _case("sums and norms", "", [(301, 257)], _norms),
    _case("updates", "", [(4099,)] * 4, _adam),
    _case("elementwise", "", [(64, 257), (64, 257)], _elementwise),
    _case(
        *("linear", "linear mm addmm bmm baddbmm matmul einsum"),
        [(96, 260), (130, 260), (130,)],
        functional.linear,
        halves=True,
    ),
    _case(
        *("conv2d", "conv2d conv1d conv3d convolution conv_transpose2d conv_transpose1d"),
        [(4, 24, 17, 19), (32, 24, 3, 3), (32,)],
        lambda a, w, b: functional.conv2d(a, w, b, stride=2, padding=1),
        halves=True,
    ),
    _case(
        *("depthwise conv2d", "conv2d convolution"),
        [(4, 32, 17, 19), (32, 1, 3, 3)],
        lambda a, w: functional.conv2d(a, w, padding=1, groups=32),
    ),
    _case(
        *("embedding", "embedding embedding_bag"),
        [(211, 48)],
        lambda table, rows: functional.embedding(rows, table),
        labels=[((16, 33), 211)],
    ),
    _case(
        *("indexing", "index index_select gather scatter scatter_add index_add index_put cat"),
        [(97, 40)],
        _indexing,
        labels=[((160,), 97)],
    ),
    _case(
        *("layer norm", "layer_norm native_layer_norm rms_norm group_norm native_group_norm"),
        [(60, 193), (193,), (193,)],
        _normed,
        halves=True,
    ),
    _case(
        *("batch norm", "batch_norm _native_batch_norm_legit native_batch_norm instance_norm"),
        [(8, 24, 9, 11), (24,), (24,)],
        _batch_norm,
    ),
    _case(
        *("attention", "scaled_dot_product_attention"),
        [(2, 4, 65, 32)] * 3,
        _attention,
        halves=True,
    ),
    _case("softmax", "softmax _softmax", [(2, 4, 33, 32)] * 3, _masked_attention, halves=True),
    _case(
        *("cross-entropy", "cross_entropy_loss nll_loss nll_loss_nd log_softmax _log_softmax"),
        [(70, 103)],
        _losses,
        labels=[((70,), 103)],
    ),
    _case(
        "other losses",
        "mse_loss l1_loss smooth_l1_loss binary_cross_entropy_with_logits",
        [(70, 53)] * 2,
        _distances,
    ),
    _case(
        *("gelu", "gelu"),
        [(64, 257)],
        lambda a: [functional.gelu(a), functional.gelu(a, approximate="tanh")],
        halves=True,
    ),
    _case("silu", "silu mish hardswish", [(64, 257)], functional.silu, halves=True),
    _case("relu and tanh", "relu leaky_relu tanh sigmoid elu hardtanh", [(64, 257)], _steps),
    _case(
        "pooling",
        "max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d max_pool1d",
        [(4, 16, 15, 18)],
        _pooling,
    ),
    _case(
        *("enlarging", "upsample_nearest2d upsample_bilinear2d interpolate"),
        [(2, 8, 10, 9)],
        _enlarged,
    ),
)
"""In this order; what every training needs comes first."""
