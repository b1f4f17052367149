"""Batch normalisation over all tiles of a map, forward and backward, from each tile's sums.

    forward     every tile sends count n, mean m and squared deviations q of what it owns;
                N = sum n,  M = sum n m / N,  Q = sum q + n (m - M)^2       (Chan et al. 1979)
                y = w (x - M) / sqrt(Q / N + eps) + b,  on all that the tile has of the map
    backward    every tile sends B = sum g and W = sum g (x - M) / sqrt(Q / N + eps) of its part
                of the gradient g; with their totals, and z = (x - M) / sqrt(Q / N + eps),
                gradient of x = w / sqrt(Q / N + eps) (g - [x is owned here] (B + z W) / N)

Inside a group several tiles may have the same position, each with its part of the gradient: the
parts add up when the halo's gradients are added, so only the owner subtracts the means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.model.graph.nodes import GraphNode
from p2ptrain.tiling.kernels.tileable_operators import arguments_of

_BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a map over all tiles and samples, per channel, float64.

    Attributes:
        count: positions times samples.
        variance: the biased one.
    """

    count: int
    mean: Tensor
    variance: Tensor


def moments(owned: Tensor) -> Tensor:
    """Mean and squared deviations of one tile's own part, by channel: float64, [2, channels].

    Of 16-bit numbers they are computed in float32, as torch does: a float16 holds no sum of squares
    beyond 65504.

    Each sample's channels by themselves, a block that the processor's cache holds at a time, so
    that the second look at it costs next to nothing: a quarter of what torch's own normalisation
    takes for it.
    """
    samples, channels = owned.shape[:2]
    rows = owned.reshape(samples * channels, -1)
    count = rows.shape[1]
    precise = torch.promote_types(rows.dtype, torch.float32)
    means, squares = torch.empty(2, len(rows), dtype=precise)
    step = max(1, _BLOCK_ELEMENTS // count)
    for first in range(0, len(rows), step):
        block = rows[first : first + step].to(precise)
        mean = torch.mean(block, 1, keepdim=True)
        means[first : first + step] = mean[:, 0]
        squares[first : first + step] = (block - mean).square_().sum(1)
    each = means.double().view(samples, channels)
    mean = each.mean(0)
    inside = squares.double().view(samples, channels).sum(0)
    return torch.stack([mean, inside + count * (each - mean).square_().sum(0)])


def combined(parts: Sequence[Tensor], counts: Sequence[int]) -> Statistics:
    """Of all tiles' `moments`, in the order of the tiles: every device finds the same bits."""
    count = sum(counts)
    mean = torch.zeros_like(parts[0][0])
    for part, n in zip(parts, counts, strict=True):
        mean += part[0] * (n / count)
    deviations = torch.zeros_like(mean)
    for part, n in zip(parts, counts, strict=True):
        deviations += part[1] + n * (part[0] - mean) ** 2
    return Statistics(count, mean, deviations / count)


class Normalisation:
    """One node of the graph with a replica's tensors."""

    def __init__(self, node: GraphNode, state: Mapping[str, Tensor]) -> None:
        arguments = arguments_of(node)

        def tensor(name: str) -> Tensor | None:
            return None if arguments[name] is None else state[arguments[name].name]

        self.weight, self.bias = tensor("weight"), tensor("bias")
        self._running = tensor("running_mean"), tensor("running_var")
        self._momentum: float = arguments["momentum"]
        self._epsilon: float = arguments["eps"]

    def track(self, statistics: Statistics) -> None:
        """Change the running statistics as one micro-batch does."""
        mean, variance = self._running
        unbiased = statistics.variance * (statistics.count / (statistics.count - 1))
        for running, new in ((mean, statistics.mean), (variance, unbiased)):
            if running is not None:
                # Behind autograd's back: earlier micro-batches' backwards do not read it.
                running.data.mul_(1 - self._momentum).add_(
                    new.to(running.dtype), alpha=self._momentum
                )

    def forward(self, x: Tensor, statistics: Statistics) -> Tensor:
        """y of the same region as x."""
        mean, variance = _as(x, statistics)
        made: Tensor = torch.ops.aten.batch_norm.default(
            x, self.weight, self.bias, mean, variance, False, 0.0, self._epsilon, False
        )
        return made

    def sums(self, gradient: Tensor, x: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """(gradient of x as if the statistics were constants, this tile's [W, B])."""
        mean, variance = _as(x, statistics)
        through, weight, bias = torch.ops.aten.native_batch_norm_backward.default(
            *(gradient, x, self.weight, mean, variance, None, None),
            *(False, self._epsilon, [True, True, True]),
        )
        return through, torch.stack([weight, bias])

    def subtract(self, gradient: Tensor, x: Tensor, statistics: Statistics, totals: Tensor) -> None:
        """Take the means off the gradient of x, in place; both of what the tile owns.

        Args:
            gradient: as `sums` gives it.
            x: the map.
            statistics: of the map.
            totals: [W, B] of all tiles, float64.
        """
        inverse = (statistics.variance + self._epsilon).rsqrt()
        scale = inverse if self.weight is None else inverse * self.weight.detach().double()
        slope = scale * inverse * totals[0] / statistics.count
        offset = scale * totals[1] / statistics.count - statistics.mean * slope
        shape = (1, -1, 1, 1)
        gradient.addcmul_(x, slope.to(x.dtype).view(shape), value=-1)
        gradient.sub_(offset.to(x.dtype).view(shape))

    def accumulate(self, sums: Tensor) -> None:
        """Add a tile's [W, B] to the parameters' `.grad`."""
        for parameter, gradient in zip((self.weight, self.bias), sums, strict=True):
            if parameter is not None and parameter.requires_grad:
                own = gradient.to(parameter.dtype, copy=True)  # others write to `.grad` in place
                parameter.grad = own if parameter.grad is None else parameter.grad + own


def _as(x: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
    return statistics.mean.to(x.dtype), statistics.variance.to(x.dtype)
