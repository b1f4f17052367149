from __future__ import annotations

import random
from collections.abc import Callable

import cbor2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.model.wire.tensor_codec import (
    Unpacking,
    copy_into,
    dtype_name,
    dtype_named,
    like,
    pack,
)
from p2ptrain.model.wire.tensor_layout import SPREAD_LIMIT

torch.set_num_threads(1)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float8_e4m3fn,
]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    elements = torch.Size(shape).numel() * dtype.itemsize
    raw = random.Random(str((shape, dtype))).randbytes(elements)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    if dtype == torch.bool:
        return (flat % 2 == 0).reshape(shape)
    return flat.clone().view(dtype).reshape(shape)


def over_the_wire(tensor: Tensor) -> Tensor:
    packed = pack(tensor)
    meta = cbor2.loads(cbor2.dumps(packed.meta))
    unpacking = Unpacking(meta, (tensor.dtype, tuple(tensor.shape)))
    assert unpacking.part_bytes == packed.part.nbytes == unpacking.buffer.nbytes
    unpacking.buffer[:] = packed.part
    return unpacking.tensor()


def raw(tensor: Tensor) -> list[int]:
    """Bytes of the values: NaNs compare too."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return values.view(-1).view(torch.uint8).tolist() if values.numel() else []


def assert_identical(sent: Tensor, got: Tensor) -> None:
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.stride() == sent.stride()
    assert got.requires_grad == sent.requires_grad
    assert raw(got) == raw(sent)
    if sent.numel():
        assert got.data_ptr() % 64 == sent.data_ptr() % 64
    assert got.is_leaf
    assert not got._is_view()


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Tensors reached by up to four of the ways in which models make views."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = filled(shape, draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 4))):
        change = draw(
            st.sampled_from([permuted, narrowed, stepped, expanded, unsqueezed, windowed])
        )
        tensor = change(draw, tensor)
    return tensor


def permuted(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


def narrowed(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    if not tensor.dim():
        return tensor
    d = draw(st.integers(0, tensor.dim() - 1))
    first = draw(st.integers(0, tensor.shape[d]))
    return tensor.narrow(d, first, draw(st.integers(0, tensor.shape[d] - first)))


def stepped(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    return tensor[:: draw(st.integers(1, 3))] if tensor.dim() else tensor


def expanded(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0).expand(draw(st.integers(0, 4)), *tensor.shape)


def unsqueezed(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(draw(st.integers(0, tensor.dim())))


def windowed(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    if not tensor.dim() or tensor.shape[0] < 2:
        return tensor
    return tensor.unfold(0, 2, 1)


@given(views())
def test_a_view_arrives_identical(tensor: Tensor) -> None:
    assert_identical(tensor, over_the_wire(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_identical(dtype: torch.dtype) -> None:
    assert_identical(filled((3, 5), dtype), over_the_wire(filled((3, 5), dtype)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.randn(6, 5).t(),
        lambda: torch.randn(4, 5)[1:],
        lambda: torch.randn(()),
        lambda: torch.empty(3, 0, 2),
        lambda: torch.randn(3).expand(4, 3),
    ],
)
def test_what_is_dense_in_some_order_is_not_copied(make: Callable[[], Tensor]) -> None:
    tensor = make()
    part = pack(tensor).part
    if tensor.numel():
        element = tensor[(0,) * tensor.dim()]
        element.view(torch.int32).fill_(0x01020304)
        assert part[:4] == (0x01020304).to_bytes(4, "little")


def test_a_repeated_dimension_travels_once() -> None:
    assert pack(torch.randn(8, 1).expand(8, 1000)).part.nbytes == 8 * 4


def test_gaps_do_not_travel() -> None:
    assert pack(torch.randn(8, 100)[:, :3]).part.nbytes == 8 * 3 * 4


def test_overlapping_windows_keep_their_strides() -> None:
    windows = torch.arange(10.0).unfold(0, 4, 1)
    assert windows.stride() == (1, 1)
    assert_identical(windows, over_the_wire(windows))


def test_leaves_that_require_a_gradient_arrive_as_such_leaves() -> None:
    tensor = torch.randn(3, 4).t().requires_grad_()
    assert_identical(tensor, over_the_wire(tensor))


def test_conjugate_and_negative_views_arrive_resolved() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(over_the_wire(tensor.conj()), tensor.conj())
    assert torch.equal(over_the_wire(tensor.conj().imag), tensor.conj().imag)


def test_a_view_too_sparse_for_receivers_is_sent_dense() -> None:
    tensor = torch.randn(3, SPREAD_LIMIT * 2)[:, 0]
    got = over_the_wire(tensor)
    assert torch.equal(got, tensor)
    assert got.stride() == (1,)


def test_the_part_outlives_the_tensor() -> None:
    part = pack(torch.full((1000,), 7, dtype=torch.uint8)).part
    assert bytes(part) == b"\x07" * 1000


def test_the_part_cannot_be_written() -> None:
    assert pack(torch.zeros(3)).part.readonly


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="sparse"):
        pack(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="on meta"):
        pack(torch.empty(3, device="meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_names_are_inverse(dtype: torch.dtype) -> None:
    assert dtype_named(dtype_name(dtype)) == dtype


def test_a_dtype_that_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        dtype_name(torch.quint8)


GOOD = ["float32", [2, 3], [3, 1], False, 0]
EXPECTED = (torch.float32, (2, 3))
HUGE = 2**62


def changed(position: int, value: object) -> list[object]:
    return [*GOOD[:position], value, *GOOD[position + 1 :]]


def test_the_good_one_is_good() -> None:
    assert Unpacking(GOOD, EXPECTED).part_bytes == 24


@pytest.mark.parametrize(
    "meta",
    [
        None,
        {},
        [],
        GOOD[:4],
        [*GOOD, 0],
        changed(0, "float64"),
        changed(0, "object"),
        changed(0, 5),
        changed(1, [3, 2]),
        changed(1, [2, 3, 1]),
        changed(1, [2, -3]),
        changed(1, [True, 3]),
        changed(1, [2.0, 3]),
        changed(1, None),
        changed(2, [3]),
        changed(2, [3, -1]),
        changed(2, [3, True]),
        changed(2, [HUGE, 1]),
        changed(2, [HUGE, HUGE]),
        changed(2, [2**64, 1]),
        changed(2, [SPREAD_LIMIT * 6 + 1, 1]),
        changed(2, [10**5000, 1]),
        changed(1, [10**5000, 1]),
        changed(0, 10**5000),
        changed(3, 10**5000),
        changed(4, 10**5000),
        changed(2, "31"),
        changed(3, 1),
        changed(3, None),
        changed(4, -4),
        changed(4, 64),
        changed(4, 2),
        changed(4, True),
        changed(4, "0"),
    ],
)
def test_a_hostile_meta_is_refused(meta: object) -> None:
    with pytest.raises(ProtocolError):
        Unpacking(meta, EXPECTED)


def test_a_stride_without_effect_is_bounded_too() -> None:
    with pytest.raises(ProtocolError, match="too sparsely"):
        Unpacking(["float32", [1], [HUGE], False, 0], (torch.float32, (1,)))


def test_integers_cannot_require_a_gradient() -> None:
    with pytest.raises(ProtocolError, match="cannot require"):
        Unpacking(["int64", [1], [1], True, 0], (torch.int64, (1,)))


def test_a_large_spread_of_a_large_tensor_is_refused() -> None:
    """A MiB of values may not make us allocate more than 64."""
    with pytest.raises(ProtocolError, match="too sparsely"):
        Unpacking(["float32", [2**18], [65], False, 0], (torch.float32, (2**18,)))
    Unpacking(["float32", [2**18], [64], False, 0], (torch.float32, (2**18,)))


def test_a_boolean_other_than_0_and_1_is_refused() -> None:
    unpacking = Unpacking(["bool", [2], [1], False, 0], (torch.bool, (2,)))
    unpacking.buffer[:] = b"\x01\x02"
    with pytest.raises(ProtocolError, match="boolean"):
        unpacking.tensor()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=5), max_leaves=12)


@given(st.lists(anything, min_size=5, max_size=5), st.integers(0, 4))
def test_nothing_but_protocol_errors(values: list[object], keep: int) -> None:
    meta = [*GOOD[:keep], *values[keep:]]
    try:
        unpacking = Unpacking(meta, EXPECTED)
    except ProtocolError:
        return
    assert unpacking.buffer.nbytes in (4, 8, 12, 24)
    assert unpacking.tensor().shape == (2, 3)


def test_a_misaligned_matmul_is_the_senders() -> None:
    """Where the operand lies on the 64-byte grid is part of the result."""
    base = torch.randn(40 * 24 + 3)
    left, right = base[3:].view(40, 24), torch.randn(24, 17)
    assert torch.equal(over_the_wire(left) @ right, left @ right)


def off_the_grid(elements: int, dtype: torch.dtype = torch.float32, offset: int = 3) -> Tensor:
    return filled((offset + elements,), dtype)[offset:]


STATES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: filled((4, 6), torch.float32),
    "transposed": lambda: filled((4, 6), torch.float64).t(),
    "channels last": lambda: filled((2, 3, 5, 5), torch.float32).to(
        memory_format=torch.channels_last
    ),
    "off the grid": lambda: off_the_grid(24).view(4, 6),
    "off the grid, transposed": lambda: off_the_grid(24, torch.bfloat16, 5).view(4, 6).t(),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "expanded": lambda: filled((4, 1), torch.float32).expand(4, 6),
    "sliced": lambda: filled((8, 6), torch.float32)[::2, 1:4],
    "parameter": lambda: torch.nn.Parameter(filled((3, 3), torch.float16)),
    "counter": lambda: torch.tensor(7),
    "mask": lambda: filled((5,), torch.bool),
}


def _grid(tensor: Tensor) -> int:
    return tensor.data_ptr() % 64 if tensor.numel() else 0


@pytest.mark.parametrize("name", STATES)
def test_a_copy_lies_as_the_original_does(name: str) -> None:
    tensor = STATES[name]()
    copy = copy_into(None, tensor)
    for made in (copy, like(tensor)):
        assert (made.dtype, made.shape, made.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert _grid(made) == _grid(tensor)
        assert made._base is None
        assert not made.requires_grad
        assert made.is_leaf
    assert raw(copy) == raw(tensor)
    if tensor.numel():
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", STATES)
def test_the_next_copy_takes_the_memory_of_the_last(name: str) -> None:
    first = copy_into(None, STATES[name]())
    before = first.data_ptr()
    second = copy_into(first, STATES[name]())
    assert second is first
    assert second.data_ptr() == before


@pytest.mark.parametrize(
    "slot",
    [
        torch.empty(4, 6),  # on the grid
        off_the_grid(24).view(6, 4).t(),
        off_the_grid(24).view(4, 6).double(),
        off_the_grid(20).view(4, 5),
    ],
    ids=["grid", "strides", "dtype", "shape"],
)
def test_memory_that_lies_otherwise_is_not_taken(slot: Tensor) -> None:
    tensor = STATES["off the grid"]()
    copy = copy_into(slot, tensor)
    assert copy is not slot
    assert raw(copy) == raw(tensor)
    assert _grid(copy) == _grid(tensor)


def test_a_view_too_sparse_to_be_sent_is_copied_dense() -> None:
    tensor = torch.arange(float(SPREAD_LIMIT * 20000))[:: SPREAD_LIMIT * 10]
    copy = copy_into(None, tensor)
    assert copy.stride() == (1,)
    assert raw(copy) == raw(tensor)
    assert copy_into(copy, tensor) is copy
