"""Our own shapes of common operators are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.model.graph.meta_common import COMMON, Unfit

aten: Any = torch.ops.aten
META = torch.device("meta")

TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@st.composite
def tensors(draw: Any, shape: list[int] | None = None) -> Tensor:
    """In order, with its dimensions in another order, or as channels-last."""
    shape = draw(st.lists(st.integers(0, 4), max_size=5)) if shape is None else shape
    dtype = draw(st.sampled_from(TYPES))
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
def broadcast(draw: Any) -> list[Tensor]:
    """Two tensors whose shapes mostly fit."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    made = []
    for _ in range(2):
        own = [draw(st.sampled_from((size, size, size, 1))) for size in shape]
        made.append(draw(tensors(own[draw(st.sampled_from((0, 0, 1))) :])))
    return made


def agrees(operator: Any, *args: Any) -> None:
    """The rule gives what torch gives, refuses what torch refuses, or leaves it to torch."""
    try:
        ours = COMMON[operator](*args)
    except Unfit:
        return
    except RuntimeError:
        with pytest.raises(RuntimeError):
            operator(*args)
        return
    theirs = operator(*args)
    assert _form(ours) == _form(theirs)


def _form(result: Tensor) -> list[Any]:
    """Without steps that are never taken."""
    steps = [result.stride(d) for d, size in enumerate(result.shape) if size > 1]
    return [result.dtype, result.shape, steps if result.numel() else []]


PAIRS = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.minimum.default, aten.maximum.default),
)


PERMUTED = torch.empty(2, 3, 1, device=META).permute(1, 0, 2)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(PAIRS), broadcast())
@example(aten.add.Tensor, [PERMUTED, torch.empty(3, 1, 4, device=META)])
def test_of_two(operator: Any, pair: list[Tensor]) -> None:
    agrees(operator, *pair)
