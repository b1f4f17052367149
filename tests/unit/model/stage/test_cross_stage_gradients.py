from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.model.stage.cross_stage_gradients import (
    clip_coefficient,
    scale_,
    tensor_norms,
    total_norm,
)

torch.set_num_threads(1)

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def parameters(seed: int, dtypes: list[torch.dtype], scale: float) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    named = {}
    for k, dtype in enumerate(dtypes):
        shape = [(3, 5), (), (40, 17), (4, 0), (129,)][k % 5]
        named[f"p{k}"] = parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        if k % 4 != 3:
            gradient = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            parameter.grad = gradient.to(dtype)
    return named


def clip_across(stages: list[dict[str, torch.nn.Parameter]], max_norm: float) -> Tensor:
    """Stage by stage in reverse, as gradients become ready; the model's order only in between."""
    norms: dict[str, Tensor] = {}
    for stage in reversed(stages):
        norms.update(tensor_norms({name: p.grad for name, p in stage.items()}))
    ordered = [norms[name] for stage in stages for name in stage if name in norms]
    coefficient = clip_coefficient(ordered, max_norm)
    for stage in stages:
        scale_((p.grad for p in stage.values()), coefficient)
    return total_norm(ordered)


def cut(named: dict[str, torch.nn.Parameter], at: int) -> list[dict[str, torch.nn.Parameter]]:
    items = list(named.items())
    return [dict(items[:at]), dict(items[at:])]


def assert_same_as_torch(
    seed: int, dtypes: list[torch.dtype], scale: float, at: int, max_norm: float
) -> None:
    whole = parameters(seed, dtypes, scale)
    expected = torch.nn.utils.clip_grad_norm_(whole.values(), max_norm)
    split = parameters(seed, dtypes, scale)
    assert torch.equal(clip_across(cut(split, at), max_norm), expected)
    for name, parameter in whole.items():
        got = split[name].grad
        assert (got is None) == (parameter.grad is None)
        if got is not None:
            assert parameter.grad is not None
            assert torch.equal(got, parameter.grad)


@given(
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 12),
    st.sampled_from([1e-4, 1.0, 1e3]),
    st.data(),
)
def test_bit_identical_to_torch(
    seed: int, dtype: torch.dtype, count: int, scale: float, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, count))
    assert_same_as_torch(seed, [dtype] * count, scale, at, max_norm=1.0)


@given(
    st.integers(0, 1000),
    st.lists(st.sampled_from(FLOATS), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_bit_identical_with_mixed_dtypes(seed: int, dtypes: list[torch.dtype], at: int) -> None:
    assert_same_as_torch(seed, dtypes, 1.0, at, max_norm=0.37)


def test_a_small_norm_leaves_gradients_as_they_are() -> None:
    gradient = torch.tensor([0.3, 0.4])
    coefficient = clip_coefficient(list(tensor_norms({"w": gradient}).values()), 1.0)
    scale_([gradient, None], coefficient)
    assert coefficient == 1.0
    assert torch.equal(gradient, torch.tensor([0.3, 0.4]))


def test_without_gradients_there_is_nothing_to_scale() -> None:
    assert tensor_norms({"w": None}) == {}
    assert clip_coefficient([], 1.0) == 1.0


def test_a_nan_is_not_hidden() -> None:
    norms = tensor_norms({"w": torch.tensor([1.0, float("nan")])})
    assert clip_coefficient(list(norms.values()), 1.0).isnan()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_have_the_gradients_dtype(dtype: torch.dtype) -> None:
    assert tensor_norms({"w": torch.ones(4, dtype=dtype)})["w"].dtype == dtype
