"""Our own shapes of common operators are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.model.graph.meta_common import COMMON, Unfit

aten: Any = torch.ops.aten
META = torch.device("meta")
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
TYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


@st.composite
def tensors(draw: Any, shape: list[int] | None = None, types: Any = TYPES) -> Tensor:
    """In order, with its dimensions in another order, or as channels-last."""
    shape = draw(st.lists(st.integers(0, 4), max_size=5)) if shape is None else shape
    dtype = draw(st.sampled_from(types))
    made = torch.empty(shape, dtype=dtype, device=META)
    how = draw(st.sampled_from(("plain", "plain", "permuted", "last", "part")))
    if how == "permuted":
        order = draw(st.permutations(range(len(shape))))
        back = sorted(range(len(shape)), key=order.__getitem__)
        return torch.empty([shape[d] for d in order], dtype=dtype, device=META).permute(back)
    if how == "last" and len(shape) in (4, 5):
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        return made.contiguous(memory_format=last)
    if how == "part" and shape:
        return torch.empty([*shape[:-1], shape[-1] + 1], dtype=dtype, device=META)[..., 1:]
    return made


@st.composite
def broadcast(draw: Any, count: int) -> list[Tensor]:
    """Tensors whose shapes mostly fit."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    made = []
    for _ in range(count):
        own = [draw(st.sampled_from((size, size, size, 1))) for size in shape]
        made.append(draw(tensors(own[draw(st.sampled_from((0, 0, 1))) :])))
    return made


@st.composite
def parts(draw: Any) -> tuple[list[Tensor], int]:
    """What `cat` takes: mostly alike but for one dimension."""
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    types = (draw(st.sampled_from(TYPES)),) if draw(st.booleans()) else TYPES
    made = []
    for _ in range(draw(st.integers(0, 3))):
        own = list(shape)
        if own:
            changed = dim if draw(st.integers(0, 9)) else 0
            own[changed % len(own)] = draw(st.integers(0, 4))
        own = draw(st.sampled_from((*[own] * 8, [0], own[:-1])))
        made.append(draw(tensors(own, types)))
    return made, dim


def agrees(operator: Any, *args: Any, **kwargs: Any) -> None:
    """The rule gives what torch gives, refuses what torch refuses, or leaves it to torch."""
    try:
        ours = COMMON[operator](*args, **kwargs)
    except Unfit:
        return
    except RuntimeError:
        with pytest.raises(RuntimeError):
            operator(*args, **kwargs)
        return
    theirs = operator(*args, **kwargs)
    assert _forms(ours) == _forms(theirs)


def _forms(result: Any) -> list[Any]:
    """Of each tensor, without steps that are never taken."""
    tensors = result if isinstance(result, tuple) else (result,)
    return [(x.dtype, x.shape, [x.stride(d) for d in _stepped(x)]) for x in tensors]


def _stepped(x: Tensor) -> list[int]:
    return [d for d, size in enumerate(x.shape) if size > 1] if x.numel() else []


SCALARS = st.sampled_from((True, 2, -1, 0.5, 1j))
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
PAIRS = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.minimum.default),
    *(aten.maximum.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor),
    *(getattr(aten, name).Tensor for name in COMPARED),
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(PAIRS), broadcast(2))
def test_of_two(operator: Any, pair: list[Tensor]) -> None:
    agrees(operator, *pair)


WITH_NUMBER = (
    *(aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar, aten.rsub.Scalar),
    *(getattr(aten, name).Scalar for name in COMPARED),
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(WITH_NUMBER), tensors(), SCALARS)
def test_with_a_number(operator: Any, x: Tensor, number: Any) -> None:
    agrees(operator, x, number)


def test_two_numbers_are_left_to_torch() -> None:
    for operator in (aten.add.Tensor, aten.div.Tensor, aten.bitwise_and.Tensor):
        for number in (1, 1.5, True):
            with pytest.raises(Unfit):
                COMMON[operator](number, number)


OF_ONE = (
    *(aten.neg.default, aten.abs.default, aten.bitwise_not.default, aten.tril.default),
    *(aten.triu.default, aten.randn_like.default, aten.rand_like.default),
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(OF_ONE), tensors())
def test_of_one(operator: Any, x: Tensor) -> None:
    agrees(operator, x)


@settings(deadline=None, max_examples=100)
@given(tensors(), st.integers(-6, 5), st.sampled_from((None, *TYPES)))
def test_cumsum(x: Tensor, dim: int, dtype: torch.dtype | None) -> None:
    agrees(aten.cumsum.default, x, dim, dtype=dtype)


@settings(deadline=None, max_examples=200)
@given(broadcast(3))
def test_where(operands: list[Tensor]) -> None:
    agrees(aten.where.self, *operands)
    agrees(aten.where.self, operands[0] != 0, *operands[1:])


@settings(deadline=None, max_examples=400)
@given(parts())
def test_cat(given_parts: tuple[list[Tensor], int]) -> None:
    agrees(aten.cat.default, *given_parts)


@settings(deadline=None, max_examples=100)
@given(broadcast(2), st.integers(0, 2))
def test_losses(pair: list[Tensor], reduction: int) -> None:
    x, target = pair
    agrees(aten.binary_cross_entropy_with_logits.default, x, target, None, None, reduction)
    agrees(aten.binary_cross_entropy_with_logits.default, x, x, target, target, reduction)
    agrees(aten.nll_loss2d_forward.default, x, target.long(), None, reduction, -100)


X = torch.empty(2, 3, 4, 5, device=META)
IDS = torch.empty(2, 3, dtype=torch.int64, device=META)
COMMONLY: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a number": (aten.add.Tensor, (X, 1e-6)),
    "positions": (aten.add.Tensor, (IDS, 0)),
    "a mask": (aten.bitwise_and.Tensor, (IDS == 0, IDS != 0)),
    "a square": (aten.pow.Tensor_Scalar, (X, 2)),
    "a class token": (aten.cat.default, ([X[0, :1], X[0].transpose(1, 2).transpose(1, 2)], 0)),
    "a turned half": (aten.cat.default, ([X.transpose(1, 2)] * 2, -1)),
    "channels-last": (aten.cat.default, ([X.to(memory_format=torch.channels_last)] * 2, 1)),
    "a causal mask": (aten.tril.default, (IDS == 0,)),
    "pixels": (aten.nll_loss2d_forward.default, (X, X[:, 0].long(), None, 1, -100)),
}


@pytest.mark.parametrize(("operator", "args"), COMMONLY.values(), ids=list(COMMONLY))
def test_what_most_models_apply_is_computed_here(operator: Any, args: tuple[Any, ...]) -> None:
    COMMON[operator](*args)
    agrees(operator, *args)
