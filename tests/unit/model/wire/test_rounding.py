from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.model.wire.rounding import (
    BLOCK_VALUES,
    MIN_VALUES,
    decode,
    encode,
    encoded_bytes,
    round_trip_,
)
from p2ptrain.model.wire.tensor_codec import Unpacking, pack
from p2ptrain.model.wire.tensor_layout import WireFormat

EXACT, BF16, INT8 = WireFormat.EXACT, WireFormat.BF16, WireFormat.INT8
ROUNDED = pytest.mark.parametrize("wire", [BF16, INT8])
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def values(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=dtype)


def received(tensor: Tensor, wire: WireFormat) -> Tensor:
    packed = pack(tensor, wire)
    unpacking = Unpacking(packed.meta, (tensor.dtype, tuple(tensor.shape)), wire)
    assert unpacking.part_bytes == packed.part.nbytes
    unpacking.buffer[:] = packed.part
    return unpacking.tensor()


def rounded(flat: Tensor, wire: WireFormat) -> Tensor:
    made = flat.clone()
    round_trip_(made, wire)
    return made


@FLOATS
def test_bf16_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    one = 2.0**-7  # the last bit of bfloat16 at 1
    given_ = torch.tensor([1 + one / 2, 1 + 1.5 * one, 1 + 0.51 * one, -3.0], dtype=dtype)
    made = rounded(given_.repeat(MIN_VALUES), BF16)[:4]
    assert made.tolist() == [1.0, 1 + 2 * one, 1 + one, -3.0]


@FLOATS
@pytest.mark.parametrize("count", [MIN_VALUES, 1000, 32 * 40 + 1])
def test_int8_is_off_by_a_128th_of_its_blocks_largest(count: int, dtype: torch.dtype) -> None:
    flat = values(count, dtype) * torch.logspace(-20, 20, count, dtype=dtype)
    made = rounded(flat, INT8)
    pairs = zip(torch.split(made, BLOCK_VALUES), torch.split(flat, BLOCK_VALUES), strict=True)
    for block, exact in pairs:
        assert (block - exact).abs().max() <= exact.abs().max() / 128


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    wire=st.sampled_from([BF16, INT8]),
    count=st.integers(MIN_VALUES, MIN_VALUES + 70),
    power=st.integers(-140, 110),
    seed=st.integers(0, 99),
)
def test_rounding_again_changes_nothing(
    wire: WireFormat, count: int, power: int, seed: int
) -> None:
    once = rounded(values(count, seed=seed) * 2.0**power, wire)
    assert torch.equal(rounded(once, wire), once)


@ROUNDED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(wire: WireFormat, bad: float) -> None:
    flat = values(1000)
    flat[700] = bad
    made = rounded(flat, wire)
    assert not made[700].isfinite()
    assert made[:672].isfinite().all()
    assert made[704:].isfinite().all()


@ROUNDED
def test_zeros_stay_zeros(wire: WireFormat) -> None:
    assert not rounded(torch.zeros(500), wire).any()
    assert not rounded(torch.full((500,), 1e-44), INT8).any()


@ROUNDED
def test_small_tensors_and_whole_numbers_stay_exact(wire: WireFormat) -> None:
    for tensor in (values(MIN_VALUES - 1), torch.arange(1000), torch.ones(1000) > 0):
        packed = pack(tensor, wire)
        assert packed.meta == pack(tensor).meta
        assert torch.equal(received(tensor, wire), tensor)


@ROUNDED
@FLOATS
def test_a_rounded_tensor_keeps_its_form(wire: WireFormat, dtype: torch.dtype) -> None:
    tensor = values(4 * 8 * 6 * 6, dtype).view(4, 8, 6, 6).to(memory_format=torch.channels_last)
    made = received(tensor.requires_grad_(), wire)
    assert (made.stride(), made.dtype, made.requires_grad) == (tensor.stride(), dtype, True)
    assert made.is_leaf
    assert (made - tensor).abs().max() < 0.05
    assert pack(tensor, wire).part.nbytes == encoded_bytes(wire, dtype, tensor.numel())


def test_what_repeats_travels_once() -> None:
    tensor = values(300).view(300, 1).expand(300, 5)
    assert pack(tensor, BF16).part.nbytes == 600
    made = received(tensor, BF16)
    assert torch.equal(made, tensor.to(torch.bfloat16).float())
    assert made.stride() == tensor.stride()


@pytest.mark.parametrize(("sent", "expected"), [(EXACT, BF16), (BF16, EXACT), (INT8, BF16)])
def test_both_must_have_the_same_format(sent: WireFormat, expected: WireFormat) -> None:
    tensor = values(1000)
    with pytest.raises(ProtocolError, match="in a job of"):
        Unpacking(pack(tensor, sent).meta, (tensor.dtype, (1000,)), expected)


def test_sizes() -> None:
    sizes = {wire: encoded_bytes(wire, torch.float32, 320) for wire in WireFormat}
    assert sizes == {EXACT: 1280, BF16: 640, INT8: 330}
    assert encoded_bytes(INT8, torch.float32, 10) == 40


def test_exact_shares_memory() -> None:
    flat = values(1000)
    assert encode(flat, EXACT).data_ptr() == flat.data_ptr()
    made = torch.empty(1000)
    decode(encode(flat, EXACT), made, EXACT)
    assert torch.equal(made, flat)
