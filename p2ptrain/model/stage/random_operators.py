"""Dropout and its like, the same on whatever device a unit runs; and one default type everywhere.

Before a unit that draws random numbers runs, torch's generator is seeded from (seed, step,
micro-batch, the unit's first node that draws), and afterwards it is restored. So masks depend
neither on how the model is cut nor on what else a device computes. A unit's number would not do:
where tiling is planned, one more unit is cut off.

A processor's generator and an accelerator's draw other numbers from one seed. So that a stage may
move between kinds of devices, and a fast card does not wait:

    dropout, and attention's    each element of a mask is a hash of its number in the tensor and of
                                two keys, made where the mask is needed, on processors too
    other operators             computed on the host (`host_operators`)

The keys come from the generator that the unit has been seeded with:

    generator of the unit -- k1, k2        number of the element -- mix(number, k1, k2) < 1 - p ?

The mix is the finalizer of MurmurHash3 (32 bits, Appleby 2008) with the second key between its two
products, so that masks of two keys are no shifted copies of each other.

`torch.zeros(3)` in a forward() travels without its type, as does the quotient of two whole numbers:
both have torch's default type, which belongs to a process. So every device sets the holder's.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.errors import OptionError
from p2ptrain.model.graph.effects import draws_random_numbers
from p2ptrain.model.graph.nodes import GraphNode
from p2ptrain.model.stage.host_operators import OnHost, where_right
from p2ptrain.model.stage.instructions import call_of

randomness_lock = threading.Lock()
"""Held while torch's global generator is seeded for a unit. Another thread that
draws from that generator (a data set with random augmentation) holds it meanwhile."""


@contextlib.contextmanager
def seeded(seed: tuple[int, ...], node: int) -> Iterator[None]:
    """Run the body with the CPU generator seeded for the nodes from `node` on; then restore it.

    Args:
        seed: (the job's seed, step, micro-batch).
        node: index in the whole model's graph.
    """
    with randomness_lock:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(derived_seed(seed, node))
        try:
            yield
        finally:
            torch.set_rng_state(before)


def derived_seed(seed: tuple[int, ...], node: int) -> int:
    """63 bits that depend on every number given, equal on every device and Python version."""
    text = ",".join(str(number) for number in (*seed, node))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def check_default_type() -> None:
    """Raises OptionError: this process has another default type than those of other devices."""
    found = torch.get_default_dtype()
    if found is not torch.float32:
        raise OptionError(
            f"torch's default type is {found} here, and torch.float32 on other devices: call "
            "torch.set_default_dtype(torch.float32) before training. Models and data may have any "
            "type of their own (model.double())"
        )


_DROPOUT = "aten.dropout.default"

_ATTENTION = "aten.scaled_dot_product_attention.default"

_HOST_ELEMENTS = 1 << 15
"""At a time on a processor, whose cache they fit."""

_BITS = 24
"""Of a hash that are compared with the probability."""


def drawing_call(
    node: GraphNode, device: ComputeDevice, *, hashes: bool
) -> Callable[..., Any] | None:
    """What computes a node that draws, where that is not its operator there; None: it is.

    Args:
        device: where the node runs.
        hashes: masks of dropout are hashed; on an accelerator they always are.
    """
    if (device.is_host and not hashes) or not draws_random_numbers(node):
        return None
    if node.operator == _DROPOUT:
        return _dropout
    if node.operator == _ATTENTION:
        return where_right(node, device, _attention)
    if device.is_host:
        return None
    return OnHost(device, call_of(node), node)


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    with torch.no_grad():
        kept = mask(tuple(tensor.shape), p, tensor.device)
        noise = kept.to(tensor.dtype) if p == 1 else kept.to(tensor.dtype).div_(1 - p)
    return tensor * noise


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose weights are dropped, by the steps that torch takes on a processor.

    (..., queries, wide), (..., keys, wide), (..., keys, out) -> (..., queries, out).
    """
    with torch.no_grad():
        kept = mask((*query.shape[:-1], key.shape[-2]), dropout_p, query.device)
    result: Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(
        *(query, key, value, attn_mask, dropout_p, is_causal, kept),
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]
    return result


def mask(shape: tuple[int, ...], p: float, place: torch.device) -> Tensor:
    """Which elements stay, each with probability 1 - p; torch's generator gives the keys.

    Args:
        p: of an element to be dropped.
        place: where the mask is made.

    Returns:
        bool, of that shape.
    """
    keys = (int(torch.randint(1 << 32, ())), int(torch.randint(1 << 32, ())))
    elements = torch.Size(shape).numel()
    least = round(p * (1 << _BITS)) - (1 << (_BITS - 1))
    parts = [
        _mixed(first, end, keys, place) >> (32 - _BITS) >= least
        for first, end in _spans(elements, place)
    ]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).view(shape)


def _spans(elements: int, place: torch.device) -> Iterator[tuple[int, int]]:
    step = _HOST_ELEMENTS if place.type == "cpu" else max(elements, 1)
    for first in range(0, max(elements, 1), step):
        yield first, min(first + step, elements)


def _mixed(first: int, end: int, keys: tuple[int, int], place: torch.device) -> Tensor:
    """int32, all bits of which depend on the number and on both keys."""
    numbers = torch.arange(_signed(first), _signed(first) + end - first, device=place)
    mixed = numbers.to(torch.int32)
    mixed.mul_(_signed(0x9E3779B1)).add_(_signed(keys[0]))
    mixed.bitwise_xor_(_shifted(mixed, 16))
    mixed.mul_(_signed(0x85EBCA6B)).add_(_signed(keys[1]))
    mixed.bitwise_xor_(_shifted(mixed, 13))
    return mixed.mul_(_signed(0xC2B2AE35))


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (numbers >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(number: int) -> int:
    """The same 32 bits as a number of int32."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
