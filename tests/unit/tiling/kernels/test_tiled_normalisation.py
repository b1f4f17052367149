from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from p2ptrain.model.graph.nodes import GraphNode, InputRef, StateRef
from p2ptrain.tiling.kernels import tiled_normalisation
from p2ptrain.tiling.kernels.tiled_normalisation import Normalisation, combined, moments

CHANNELS, ROWS = 3, 8
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def normalisation(state: dict[str, Tensor], *, affine: bool) -> Normalisation:
    weight, bias = (StateRef("weight"), StateRef("bias")) if affine else (None, None)
    running = StateRef("mean"), StateRef("variance")
    args = (InputRef(0), weight, bias, *running, True, 0.2, 1e-5, False)
    return Normalisation(GraphNode("norm", "aten.batch_norm.default", args, (), True), state)


@settings(max_examples=20, deadline=None)
@given(
    st.sets(st.integers(1, ROWS - 1), max_size=3),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from((0.0, 1e4)),
)
def test_parts_are_the_whole(inner: set[int], affine: bool, samples: int, shift: float) -> None:
    state = {
        "weight": torch.rand(CHANNELS, dtype=torch.float64).requires_grad_(),
        "bias": torch.rand(CHANNELS, dtype=torch.float64).requires_grad_(),
        "mean": torch.rand(CHANNELS, dtype=torch.float64),
        "variance": torch.rand(CHANNELS, dtype=torch.float64),
    }
    own = {name: tensor.detach().clone() for name, tensor in state.items()}
    x = torch.randn(samples, CHANNELS, ROWS, 5, dtype=torch.float64) + shift
    x.requires_grad_()
    gradient = torch.randn_like(x)
    weight, bias = (state["weight"], state["bias"]) if affine else (None, None)
    y = functional.batch_norm(x, state["mean"], state["variance"], weight, bias, True, 0.2)
    y.backward(gradient)

    ours = normalisation(
        {**own, "weight": own["weight"].requires_grad_(), "bias": own["bias"].requires_grad_()},
        affine=affine,
    )
    borders = [0, *sorted(inner), ROWS]
    cuts = [slice(a, b) for a, b in itertools.pairwise(borders)]
    parts = [x.detach()[:, :, rows] for rows in cuts]
    counts = [part.numel() // CHANNELS for part in parts]
    statistics = combined([moments(part) for part in parts], counts)
    ours.track(statistics)
    loose = {"rtol": 1e-9, "atol": 1e-7} if shift else EXACT
    torch.testing.assert_close(own["mean"], state["mean"], **EXACT)
    torch.testing.assert_close(own["variance"], state["variance"], **loose)
    with torch.no_grad():
        made = torch.cat([ours.forward(part, statistics) for part in parts], 2)
    torch.testing.assert_close(made, y.detach(), **loose)
    found = [
        ours.sums(gradient[:, :, rows], part, statistics)
        for rows, part in zip(cuts, parts, strict=True)
    ]
    totals = torch.stack([sums for _, sums in found]).sum(0)
    for (through, sums), part in zip(found, parts, strict=True):
        ours.accumulate(sums)
        ours.subtract(through, part, statistics, totals)
    torch.testing.assert_close(torch.cat([g for g, _ in found], 2), x.grad, **loose)
    if affine:
        torch.testing.assert_close(ours.weight.grad, state["weight"].grad, **loose)
        torch.testing.assert_close(ours.bias.grad, state["bias"].grad, **loose)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_of_16_bits_are_those_of_the_same_numbers_in_32(dtype: torch.dtype) -> None:
    """The sum of squares here is beyond what a float16 holds."""
    generator = torch.Generator().manual_seed(3)
    rows = (8 * torch.randn(2, 3, 60, 60, generator=generator) + 16).to(dtype)
    assert moments(rows)[1].min() > 1e5
    torch.testing.assert_close(moments(rows), moments(rows.float()), rtol=0, atol=0)


def test_moments_in_single_precision_are_near_those_in_double() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, CHANNELS, 64, 64, generator=generator) + 20.0
    statistics = combined(
        [moments(x[:, :, :30]), moments(x[:, :, 30:])], [2 * 30 * 64, 2 * 34 * 64]
    )
    variance, mean = torch.var_mean(x.double(), dim=(0, 2, 3), correction=0)
    assert (statistics.mean / mean - 1).abs().max() < 1e-6
    assert (statistics.variance / variance - 1).abs().max() < 1e-6


@pytest.mark.parametrize("count", [[4, 4], [2, 6]])
def test_everybody_finds_the_same_bits(count: list[int]) -> None:
    parts = [moments(torch.randn(1, CHANNELS, n, 3)) for n in count]
    first, second = (combined(parts, count) for _ in range(2))
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.variance, second.variance)


@pytest.mark.parametrize("elements", [1, 500, 1 << 17])
def test_moments_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Also of a view with gaps, far from nought, in single precision."""
    monkeypatch.setattr(tiled_normalisation, "_BLOCK_ELEMENTS", elements)
    x = torch.randn(3, 5, 20, 31)[:, :, 2:, :-3] + 30.0
    mean, squares = moments(x)
    exact = x.double().transpose(0, 1).reshape(5, -1)
    torch.testing.assert_close(mean, exact.mean(1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(
        squares, exact.var(1, unbiased=False) * exact.shape[1], rtol=1e-5, atol=0.0
    )
