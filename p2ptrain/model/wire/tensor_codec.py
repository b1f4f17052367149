"""Tensors on their way between devices: (meta, bytes) out, the same tensor in.

What arrives has the sender's values bit for bit, its strides, and its position on the 64-byte grid,
in memory that torch allocated. Each of these has been seen to change later results when it was
lost. The meta is part of a message's header; the bytes are one of its parts. Where a job asked for
another `WireFormat`, values are rounded to it; the meta names it, and both must have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from p2ptrain.devices.processor import HOST
from p2ptrain.errors import ProtocolError
from p2ptrain.model.wire.rounding import applies, decode, encode, encoded_bytes
from p2ptrain.model.wire.tensor_layout import (
    ALIGNMENT,
    TensorLayout,
    WireFormat,
    checked_layout,
    layout_of,
)

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}

_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}

_META_LENGTH = 5


def dtype_name(dtype: torch.dtype) -> str:
    """Its name on the wire, such as "float32".

    Raises:
        ValueError: no tensor of this type can be sent (quantized and sub-byte types).
    """
    if dtype not in _NAMES:
        raise ValueError(f"tensors of {dtype} cannot be sent")
    return _NAMES[dtype]


def dtype_named(name: object) -> torch.dtype:
    """The inverse of `dtype_name`, for a peer's text.

    Raises:
        ProtocolError: no such type.
    """
    if not isinstance(name, str) or name not in _BY_NAME:
        raise ProtocolError("unknown element type")
    return _BY_NAME[name]


HostBuffer: TypeAlias = Callable[[int, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor ready to be sent.

    Attributes:
        meta: CBOR-able [dtype, shape, strides, requires_grad, offset on the 64-byte grid], and the
            wire format where values were rounded.
        part: its bytes, read-only, format "B"; shares the tensor's memory where that is dense and
            nothing was rounded.
    """

    meta: list[Any]
    part: memoryview


def pack(tensor: torch.Tensor, wire: WireFormat = WireFormat.EXACT) -> PackedTensor:
    """Prepare a strided CPU tensor for sending; no copy when it is dense in any permutation.

    The part keeps the memory alive. The tensor may not be written to until the part is sent.

    Raises:
        ValueError: sparse, not on the CPU, or of a type that cannot be sent.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"a {tensor.layout} tensor on {tensor.device} cannot be sent")
    plain = tensor.detach().resolve_conj().resolve_neg()
    layout = _layout_to_copy(plain)
    meta = [
        dtype_name(plain.dtype),
        list(layout.shape),
        list(layout.strides),
        tensor.requires_grad,
        _grid_offset(plain),
    ]
    flat = _compact(plain, layout)
    if applies(wire, flat.dtype, flat.numel()):
        meta.append(wire.value)
        flat = encode(flat, wire)
    return PackedTensor(meta, bytes_of(flat).toreadonly())


def like(tensor: torch.Tensor) -> torch.Tensor:
    """New memory, uninitialised, with the tensor's dtype, shape, strides and grid position.

    A view too sparse to be sent (`TensorLayout.is_within_limits`) becomes dense, as when it is
    sent. On the tensor's device; of an accelerator all memory begins on the grid.
    """
    layout = _layout_to_copy(tensor)
    if tensor.device.type != "cpu":
        return tensor.detach().new_empty_strided(layout.shape, layout.strides)
    before = _grid_offset(tensor) // tensor.itemsize
    room = torch.empty(before + layout.extent, dtype=tensor.dtype)
    spread = torch.empty(0, dtype=tensor.dtype)  # no view: a parameter made of it is a leaf
    spread.set_(room.untyped_storage(), before, layout.shape, layout.strides)
    return spread


def copy_into(slot: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor`, laid out as `like` has it; in the memory of `slot` if that is so too.

    Writing to memory that the process already has costs about a fifth of taking new memory.
    """
    source = tensor.detach().resolve_conj().resolve_neg()
    copy = slot if slot is not None and _lies_like(slot, source) else like(source)
    places = _first_of_repeated(_layout_to_copy(source))  # torch writes to no repeated element
    copy[places].copy_(source[places])
    return copy


def _lies_like(slot: torch.Tensor, tensor: torch.Tensor) -> bool:
    layout = _layout_to_copy(tensor)
    return (
        (slot.dtype, slot.device) == (tensor.dtype, tensor.device)
        and (tuple(slot.shape), tuple(slot.stride())) == (layout.shape, layout.strides)
        and _grid_offset(slot) == _grid_offset(tensor)
    )


def _layout_to_copy(tensor: torch.Tensor) -> TensorLayout:
    layout = layout_of(tuple(tensor.shape), tensor.stride())
    return layout if layout.is_within_limits(tensor.itemsize) else layout.densified()


def _grid_offset(tensor: torch.Tensor) -> int:
    """Bytes past the 64-byte grid; 0 where they are no whole number of elements."""
    if tensor.device.type != "cpu":
        return 0
    offset = tensor.data_ptr() % ALIGNMENT
    return 0 if offset % tensor.itemsize else offset


def _compact(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """What travels, as a 1-D contiguous tensor: a view if `tensor` lies that way already."""
    if not layout.compact_elements:
        return tensor.new_empty(0)
    if layout.is_dense:
        if tuple(tensor.stride()) != layout.strides:
            tensor = _laid_out(tensor, layout)
        return tensor.as_strided((layout.compact_elements,), (1,))
    return tensor[_first_of_repeated(layout)].contiguous().view(-1)


def _laid_out(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=tensor.dtype).copy_(tensor)


def _first_of_repeated(layout: TensorLayout) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in layout.compact_shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Memory of a contiguous tensor. numpy only ever sees uint8, which it shares as it is."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


class Unpacking:
    """One tensor being received: made from its meta, filled through `buffer`, then `tensor()`.

    Args:
        meta: as the peer sent it.
        expected: dtype and shape by this device's own plan.
        wire: the job's format.
        slot: memory of a tensor no longer in use, taken if its layout is the one wanted.
        buffer: gives uninitialised host memory of so many elements, 1-D.

    Raises:
        ProtocolError: the meta is not what `pack` makes of a tensor of that dtype and shape.
            Nothing has been allocated then.
    """

    def __init__(
        self,
        meta: object,
        expected: tuple[torch.dtype, tuple[int, ...]],
        wire: WireFormat = WireFormat.EXACT,
        slot: torch.Tensor | None = None,
        buffer: HostBuffer = HOST.host_buffer,
    ) -> None:
        if not isinstance(meta, list) or not _META_LENGTH <= len(meta) <= _META_LENGTH + 1:
            raise ProtocolError("a tensor's description is malformed")
        self._dtype, shape = expected
        if dtype_named(meta[0]) != self._dtype:
            raise ProtocolError(f"a tensor of {self._dtype} was expected, not {meta[0]}")
        self._layout = checked_layout(meta[1], meta[2], shape, self._dtype.itemsize)
        self._requires_grad = self._checked_requires_grad(meta[3])
        self._offset_bytes = self._checked_offset(meta[4])
        self._wire = self._checked_wire(meta[_META_LENGTH:], wire)
        self._slot = slot
        self._new = buffer
        self._flat: torch.Tensor | None = None  # where values are, once there is memory
        self._encoded: torch.Tensor | None = None  # where rounded ones arrive

    @property
    def part_bytes(self) -> int:
        """Bytes of the part that must follow."""
        return encoded_bytes(self._wire, self._dtype, self._layout.compact_elements)

    @property
    def buffer(self) -> memoryview:
        """Writable, format "B", exactly `part_bytes` long; allocated at the first use."""
        flat = self._values()
        return bytes_of(flat if self._encoded is None else self._encoded)

    def tensor(self) -> torch.Tensor:
        """The tensor, once `buffer` has been filled: a leaf with the sender's `requires_grad`.

        Raises:
            ProtocolError: a boolean tensor with bytes other than 0 and 1.
        """
        flat = self._values()
        if self._encoded is not None:
            decode(self._encoded, flat, self._wire)
        if self._dtype == torch.bool and (flat.view(torch.uint8) > 1).any():
            raise ProtocolError("a boolean tensor holds other values than 0 and 1")
        if not self._layout.is_dense:
            flat = self._scattered(flat)
        storage, first = flat.untyped_storage(), flat.storage_offset()
        spread = torch.empty(0, dtype=self._dtype)  # no view of `flat`: leaves must not be views
        spread.set_(storage, first, self._layout.shape, self._layout.strides)
        return spread.requires_grad_(self._requires_grad)

    def _values(self) -> torch.Tensor:
        """Where the part arrives: dense memory is used as it is, on the sender's grid offset."""
        if self._flat is None:
            elements = self._layout.compact_elements
            if self._slot is not None and self._suits(self._slot):
                self._flat = self._slot.detach().as_strided((elements,), (1,))
            else:
                self._flat = self._allocate(elements)
            if applies(self._wire, self._dtype, elements):
                self._encoded = torch.empty(self.part_bytes, dtype=torch.uint8)
        return self._flat

    def _suits(self, slot: torch.Tensor) -> bool:
        lies_so = (tuple(slot.shape), tuple(slot.stride()), _grid_offset(slot)) == (
            self._layout.shape,
            self._layout.strides,
            self._offset_bytes,
        )
        return slot.dtype == self._dtype and self._layout.is_dense and lies_so

    def _allocate(self, elements: int) -> torch.Tensor:
        """Uninitialised, 1-D, as far past the 64-byte grid as the sender's memory."""
        before = self._offset_bytes // self._dtype.itemsize
        room = self._new(before + elements, self._dtype)
        return room[before:] if before else room

    def _scattered(self, compact: torch.Tensor) -> torch.Tensor:
        """The values at their places in new memory of the sender's extent."""
        layout = self._layout
        flat = self._allocate(layout.extent)
        places = flat.as_strided(layout.compact_shape, layout.strides)
        places.copy_(compact.view(layout.compact_shape))
        return flat

    def _checked_requires_grad(self, value: object) -> bool:
        can = self._dtype.is_floating_point or self._dtype.is_complex
        if not isinstance(value, bool) or (value and not can):
            raise ProtocolError(f"a tensor of {self._dtype} cannot require a gradient")
        return value

    def _checked_wire(self, names: list[object], wire: WireFormat) -> WireFormat:
        rounded = applies(wire, self._dtype, self._layout.compact_elements)
        if names != ([wire.value] if rounded else []):
            raise ProtocolError(f"a tensor came as {names or 'exact'} in a job of {wire.value}")
        return wire

    def _checked_offset(self, value: object) -> int:
        ok = type(value) is int and 0 <= value < ALIGNMENT and value % self._dtype.itemsize == 0
        if not ok:
            raise ProtocolError(f"a tensor of {self._dtype} lies off the grid of its elements")
        assert isinstance(value, int)
        return value
