"""Fewer bytes for values on the wire, where the user asks for that: rounded, never silently.

Only float32 and float64, and only tensors large enough to matter; everything else stays exact.

* bf16: bfloat16, rounded to nearest even: 8 bits of precision, float32's range; 2 bytes a value.
* int8: blocks of 32 values that share a power of two, as MXINT8 of the OCP Microscaling Formats
  specification 1.0 (section 5.3): 1 byte a value and 1 a block. A value is off by at most 1/128 of
  the largest in its block.

Rounding a second time changes nothing, so values may be passed on from device to device, and all
who receive them, and their sender, can hold the same bits. What is not finite stays so: as it is in
bf16, and as NaN for its whole block in int8.

    encoded int8:  exponent of each block (1 byte, -128 = not finite) | values (1 byte each)
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2ptrain.model.wire.tensor_layout import WireFormat

BLOCK_VALUES = 32

MIN_VALUES = 256
"""Smaller tensors stay exact: they are no load, and often sums that much hangs on."""

_LARGEST = 127

_NOT_FINITE = -128

_MIN_EXPONENT, _MAX_EXPONENT = -100, 120
"""Smaller values become zero, larger ones count as not finite: far from what training meets."""


def applies(wire: WireFormat, dtype: torch.dtype, values: int) -> bool:
    """Whether a tensor of so many values is converted."""
    floating = dtype in (torch.float32, torch.float64)
    return wire is not WireFormat.EXACT and floating and values >= MIN_VALUES


def encoded_bytes(wire: WireFormat, dtype: torch.dtype, values: int) -> int:
    """What a tensor of so many values takes on the wire."""
    if not applies(wire, dtype, values):
        return values * dtype.itemsize
    return 2 * values if wire is WireFormat.BF16 else values + _blocks(values)


def encode(flat: Tensor, wire: WireFormat) -> Tensor:
    """`flat` (1-D, contiguous, float32 or float64) as uint8, `encoded_bytes` long.

    Where the format does not apply: the same memory, exactly.
    """
    if not applies(wire, flat.dtype, flat.numel()):
        return flat.view(torch.uint8)
    if wire is WireFormat.BF16:
        return flat.to(torch.bfloat16).view(torch.uint8)
    return _encode_int8(flat)


def decode(encoded: Tensor, flat: Tensor, wire: WireFormat) -> None:
    """Fill `flat` (1-D, contiguous) from what `encode` gave for a tensor of its type and size."""
    if not applies(wire, flat.dtype, flat.numel()):
        flat.copy_(encoded.view(flat.dtype))
    elif wire is WireFormat.BF16:
        flat.copy_(encoded.view(torch.bfloat16))
    else:
        _decode_int8(encoded.view(torch.int8), flat)


def decoded(encoded: Tensor, dtype: torch.dtype, values: int, wire: WireFormat) -> Tensor:
    """What `encode` was given, 1-D; shares the memory of `encoded` where that is exact."""
    if not applies(wire, dtype, values):
        return encoded.view(dtype)
    flat = torch.empty(values, dtype=dtype)
    decode(encoded, flat, wire)
    return flat


def round_trip_(flat: Tensor, wire: WireFormat) -> None:
    """Give `flat` the values that a receiver of it would have."""
    if applies(wire, flat.dtype, flat.numel()):
        decode(encode(flat, wire), flat, wire)


def _blocks(values: int) -> int:
    return -(-values // BLOCK_VALUES)


def _encode_int8(flat: Tensor) -> Tensor:
    count, blocks = flat.numel(), _blocks(flat.numel())
    rows = flat
    if count % BLOCK_VALUES:
        rows = torch.nn.functional.pad(flat, (0, blocks * BLOCK_VALUES - count))
    rows = rows.view(blocks, BLOCK_VALUES)
    largest = rows.abs().amax(1)  # [blocks]; NaN where there is one
    _, exponents = torch.frexp(largest)  # largest < 2**exponent
    exponents = (exponents - 7).clamp_(_MIN_EXPONENT, _MAX_EXPONENT)
    finite = largest < 2.0 ** (_MAX_EXPONENT + 7)  # False for NaN
    scale = torch.ldexp(torch.ones_like(largest), -exponents).where(finite, 0.0)
    scaled = (rows * scale.unsqueeze(1)).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0)
    encoded = torch.empty(blocks + count, dtype=torch.int8)
    encoded[:blocks] = exponents.where(finite, _NOT_FINITE)
    encoded[blocks:] = scaled.view(-1)[:count]
    return encoded.view(torch.uint8)


def _decode_int8(encoded: Tensor, flat: Tensor) -> None:
    count, blocks = flat.numel(), _blocks(flat.numel())
    exponents = encoded[:blocks].clamp(max=_MAX_EXPONENT)
    scale = torch.ldexp(torch.ones(blocks, dtype=flat.dtype), exponents.to(torch.int32))
    scale.masked_fill_(encoded[:blocks] == _NOT_FINITE, torch.nan)
    flat.copy_(encoded[blocks:])
    whole = count // BLOCK_VALUES
    flat[: whole * BLOCK_VALUES].view(whole, BLOCK_VALUES).mul_(scale[:whole].unsqueeze(1))
    flat[whole * BLOCK_VALUES :].mul_(scale[-1])
