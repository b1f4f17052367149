"""A torch module from the sections of a .cfg file.

Read are [convolutional], [maxpool], [avgpool], [route], [shortcut], [upsample], [dropout],
[connected] and [softmax]. Reading ends in front of the first loss ([region], [yolo], [detection],
[cost]): training brings its own. Keys that are not read and would change a layer are errors, as
sections are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tools.darknet.cfg import Section
from tools.darknet.keys import check_keys

LOSSES = frozenset({"region", "yolo", "detection", "cost"})
MOMENTUM = 0.01
"""Darknet's rolling statistics keep 0.99 of what they were."""
EPSILON = 1e-6

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "leaky": lambda: nn.LeakyReLU(0.1, inplace=True),
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "mish": nn.Mish,
    "swish": nn.SiLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
}

Shape = tuple[int, int, int]
"""Channels, height, width; of a vector (length, 1, 1)."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module, the layers it reads (the one before it is -1 at the first: the image) and makes."""

    module: nn.Module
    reads: tuple[int, ...]
    shape: Shape


class Darknet(nn.Module):
    """The layers of a .cfg file in its order.

    Attributes:
        layers: one a section; "layers.12" is the file's layer 12.
        input_shape, output_shape: without the samples.
    """

    def __init__(self, sections: Sequence[Section], count: int | None = None) -> None:
        """Build the first `count` layers; None = all in front of the first loss.

        Raises:
            CfgError: a section or a value that is not read, shapes that do not fit.
        """
        super().__init__()
        net, layers = sections[0], sections[1:]
        self.input_shape: Shape = (
            net.whole("channels", 3, least=1),
            net.whole("height", least=1),
            net.whole("width", least=1),
        )
        if count is not None and not 1 <= count <= len(layers):
            raise net.error(f"has {len(layers)} layers behind it, not {count}")
        made: list[_Layer] = []
        for section in layers[:count]:
            if section.name in LOSSES:
                if count is not None:
                    raise section.error(f"is a loss; it is layer {len(made)}, counted from 0")
                break
            made.append(_layer(section, made, self.input_shape))
        if not made:
            raise net.error("is followed by no layer")
        self.layers = nn.ModuleList(layer.module for layer in made)
        self._reads = [layer.reads for layer in made]
        self._last = {read: k for k, reads in enumerate(self._reads) for read in reads}
        self.output_shape = made[-1].shape

    def forward(self, x: Tensor) -> Tensor:
        made = {-1: x}
        for k, layer in enumerate(self.layers):
            x = layer(*(made[read] for read in self._reads[k]))
            made[k] = x
            for read in self._reads[k]:
                if self._last[read] == k:
                    made.pop(read, None)
        return x


def _layer(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    build = _BUILDERS.get(section.name)
    if build is None:
        raise section.error(f"is not read here (read are {', '.join(sorted(_BUILDERS))})")
    check_keys(section)
    return build(section, before, image)


def _previous(before: Sequence[_Layer], image: Shape) -> Shape:
    return before[-1].shape if before else image


def _convolutional(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    channels, height, width = _previous(before, image)
    filters = section.whole("filters", 1, least=1)
    size, stride = section.whole("size", 1, least=1), section.whole("stride", 1, least=1)
    dilation, groups = section.whole("dilation", 1, least=1), section.whole("groups", 1, least=1)
    padding = size // 2 if section.whole("pad", 0) else section.whole("padding", 0)
    normalised = bool(section.whole("batch_normalize", 0))
    if channels % groups or filters % groups:
        raise section.error(f"divides {channels} channels into {groups} groups")
    convolution = nn.Conv2d(
        channels, filters, size, stride, padding * dilation, dilation, groups, bias=not normalised
    )
    modules: list[nn.Module] = [convolution]
    if normalised:
        modules.append(nn.BatchNorm2d(filters, eps=EPSILON, momentum=MOMENTUM))
    modules += _activation(section, "logistic")
    extent = dilation * (size - 1) + 1
    height, width = (
        (side + 2 * padding * dilation - extent) // stride + 1 for side in (height, width)
    )
    return _made(section, nn.Sequential(*modules), before, (filters, height, width))


def _maxpool(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    channels, height, width = _previous(before, image)
    stride = section.whole("stride", 1, least=1)
    size = section.whole("size", stride, least=1)
    padding = section.whole("padding", size - 1)
    low, high = padding // 2, padding - padding // 2
    module: nn.Module
    if low == high and low <= size // 2:
        module = nn.MaxPool2d(size, stride, low)
    elif padding == 1 and size == stride == 2:
        module = nn.MaxPool2d(size, stride, ceil_mode=True)  # the same, without a copy
    else:
        pad = nn.ConstantPad2d((low, high, low, high), -torch.inf)
        module = nn.Sequential(pad, nn.MaxPool2d(size, stride))
    height, width = ((side + padding - size) // stride + 1 for side in (height, width))
    return _made(section, module, before, (channels, height, width))


def _avgpool(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    channels = _previous(before, image)[0]
    return _made(section, nn.AdaptiveAvgPool2d(1), before, (channels, 1, 1))


def _upsample(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    channels, height, width = _previous(before, image)
    stride = section.whole("stride", 2, least=1)
    shape = channels, height * stride, width * stride
    return _made(section, nn.Upsample(scale_factor=stride, mode="nearest"), before, shape)


def _dropout(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    text = section.values.get("probability", "0.5")
    try:
        probability = float(text)
    except ValueError:
        probability = math.nan
    if not 0 <= probability <= 1:
        raise section.error(f"probability={text} is not between 0 and 1")
    return _made(section, nn.Dropout(probability), before, _previous(before, image))


def _connected(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    channels, height, width = _previous(before, image)
    output = section.whole("output", 1, least=1)
    linear = nn.Linear(channels * height * width, output)
    modules = [nn.Flatten(), linear, *_activation(section, "logistic"), nn.Unflatten(1, (-1, 1, 1))]
    return _made(section, nn.Sequential(*modules), before, (output, 1, 1))


def _softmax(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    shape = _previous(before, image)
    if shape[1:] != (1, 1) and not section.whole("spatial", 0):
        raise section.error(f"without spatial=1 is over all of a map of shape {shape} at once")
    return _made(section, nn.Softmax(1), before, shape)


class _Join(nn.Module):
    """Channels of several layers, of which a [route] may take one group."""

    def __init__(self, groups: int, group: int) -> None:
        super().__init__()
        self.groups, self.group = groups, group

    def forward(self, *parts: Tensor) -> Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return whole if self.groups == 1 else whole.chunk(self.groups, 1)[self.group]


def _route(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    reads = tuple(_place(section, number, before) for number in section.wholes("layers"))
    groups = section.whole("groups", 1, least=1)
    group = section.whole("group_id", 0)
    shapes = [before[read].shape for read in reads]
    channels = sum(shape[0] for shape in shapes)
    if len({shape[1:] for shape in shapes}) != 1:
        raise section.error(f"joins maps of different sizes: {shapes}")
    if channels % groups or group >= groups:
        raise section.error(f"takes group {group} of {groups} of {channels} channels")
    shape = channels // groups, *shapes[0][1:]
    return _Layer(_Join(groups, group), reads, shape)


class _Add(nn.Module):
    """The sum of two layers, and an activation."""

    def __init__(self, activation: Sequence[nn.Module]) -> None:
        super().__init__()
        self.activation = nn.Sequential(*activation)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        made: Tensor = self.activation(one + other)
        return made


def _shortcut(section: Section, before: Sequence[_Layer], image: Shape) -> _Layer:
    if not before:
        raise section.error("has no layer before it")
    numbers = section.wholes("from")
    if len(numbers) != 1:
        raise section.error(f"from={section.values['from']}: one layer is read, not several")
    other = _place(section, numbers[0], before)
    here, there = before[-1].shape, before[other].shape
    if here != there:
        raise section.error(f"adds maps of shapes {here} and {there}")
    return _Layer(_Add(_activation(section, "linear")), (len(before) - 1, other), here)


def _place(section: Section, number: int, before: Sequence[_Layer]) -> int:
    """The layer that a number stands for: from 0, or back from here."""
    place = number if number >= 0 else len(before) + number
    if not 0 <= place < len(before):
        raise section.error(f"names layer {number}, but it is layer {len(before)} itself")
    return place


def _activation(section: Section, default: str) -> list[nn.Module]:
    name = section.values.get("activation", default)
    if name == "linear":
        return []
    if name not in ACTIVATIONS:
        raise section.error(f"activation={name} is not among {', '.join(sorted(ACTIVATIONS))}")
    return [ACTIVATIONS[name]()]


def _made(section: Section, module: nn.Module, before: Sequence[_Layer], shape: Shape) -> _Layer:
    if min(shape) < 1:
        raise section.error(f"would make a map of shape {shape}")
    return _Layer(module, (len(before) - 1,), shape)


_BUILDERS: Mapping[str, Callable[[Section, Sequence[_Layer], Shape], _Layer]] = {
    "convolutional": _convolutional,
    "conv": _convolutional,
    "maxpool": _maxpool,
    "avgpool": _avgpool,
    "route": _route,
    "shortcut": _shortcut,
    "upsample": _upsample,
    "dropout": _dropout,
    "connected": _connected,
    "softmax": _softmax,
}
