"""Regions of maps as tensors: taken out, put back, added up."""

from __future__ import annotations

import torch
from torch import Tensor

from p2ptrain.tiles.span import Region


def cut(tensor: Tensor, cuts: tuple[slice, slice] | None) -> Tensor:
    """A region of samples x channels x rows x columns."""
    return tensor if cuts is None else tensor[:, :, cuts[0], cuts[1]]


def part(tensor: Tensor, held: Region, wanted: Region) -> Tensor:
    """The `wanted` region of a tensor that holds `held`."""
    return tensor if wanted == held else cut(tensor, wanted.within(held))


def embedded(tensor: Tensor, region: Region, whole: Region) -> Tensor:
    """A tensor of `whole` with `tensor` in its `region`, zeros around it."""
    if region == whole:
        return tensor
    shape = (*tensor.shape[:2], whole.rows.size, whole.columns.size)
    made = tensor.new_zeros(shape)
    cut(made, region.within(whole)).copy_(tensor)
    return made


def copied(tensor: Tensor, region: Region, whole: Region) -> Tensor:
    """As `embedded`, in memory of its own."""
    if region == whole:
        return tensor.clone(memory_format=torch.contiguous_format)
    return embedded(tensor, region, whole)


def add_to(gradients: dict[int, Tensor], number: int, gradient: Tensor | None) -> None:
    if gradient is not None:
        known = gradients.get(number)
        gradients[number] = gradient if known is None else known + gradient
