"""Small versions of well-known convolutional networks: their shapes, with a few channels.

Sources of the shapes: YOLOv2 (Redmon and Farhadi 2017, its Darknet-19 up to layer 16), VGG-16
(Simonyan and Zisserman 2015, configuration D), ResNet-18 (He et al. 2016), MobileNetV2 (Sandler et
al. 2018), U-Net (Ronneberger et al. 2015, padded, with batch normalisation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 5


class Classifier(nn.Module):
    """Convolutions, the mean over all positions, one linear layer."""

    def __init__(self, features: nn.Module, channels: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


def _normalised(
    before: int,
    after: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    activation: nn.Module | None = None,
) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    tail = [] if activation is None else [activation]
    return [convolution, nn.BatchNorm2d(after), *tail]


def yolo() -> nn.Module:
    """The first 16 layers of YOLOv2: 3x3 and 1x1 convolutions and 2x2 pooling."""
    plan: list[tuple[int, int] | None] = [(4, 3), None, (5, 3), None, (6, 3), (4, 1), (6, 3), None]
    plan += [(8, 3), (5, 1), (8, 3), None, (10, 3), (6, 1), (10, 3), (6, 1)]
    layers: list[nn.Module] = []
    channels = 3
    for layer in plan:
        if layer is None:
            layers.append(nn.MaxPool2d(2, 2))
            continue
        activation = nn.LeakyReLU(0.1, inplace=True)
        layers += _normalised(channels, layer[0], layer[1], activation=activation)
        channels = layer[0]
    return Classifier(nn.Sequential(*layers), channels)


def vgg() -> nn.Module:
    """The 13 convolutions of VGG-16, drawn so that signals do not die away (He et al. 2015)."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((4, 2), (5, 2), (6, 3), (7, 3), (8, 3)):
        for _ in range(count):
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    return Classifier(nn.Sequential(*layers), channels)


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_normalised(before, after, 3, stride), nn.ReLU(inplace=True))
        self.second = nn.Sequential(*_normalised(after, after))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(*_normalised(before, after, 1, stride))
        self.activation: nn.Module = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        y += self.shortcut(x)
        out: Tensor = self.activation(y)
        return out


def resnet() -> nn.Module:
    """ResNet-18 up to its global pooling."""
    layers = _normalised(3, 4, 7, 2, activation=nn.ReLU(inplace=True))
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 4
    for width, stride in ((4, 1), (6, 2), (8, 2), (10, 2)):
        for first in (True, False):
            layers.append(BasicBlock(channels, width, stride if first else 1))
            channels = width
    return Classifier(nn.Sequential(*layers), channels)


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, depthwise, narrow."""

    def __init__(self, before: int, after: int, stride: int, widening: int) -> None:
        super().__init__()
        inner = before * widening
        layers: list[nn.Module] = []
        if widening != 1:
            layers += _normalised(before, inner, 1, activation=nn.ReLU6(inplace=True))
        layers += _normalised(inner, inner, 3, stride, inner, nn.ReLU6(inplace=True))
        layers += _normalised(inner, after, 1)
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


def mobilenet() -> nn.Module:
    """MobileNetV2 up to its global pooling, at most two blocks a stage."""
    layers = _normalised(3, 4, 3, 2, activation=nn.ReLU6(inplace=True))
    channels = 4
    table = ((1, 3, 1, 1), (3, 4, 2, 2), (3, 5, 2, 2), (3, 6, 2, 2), (3, 7, 2, 1), (3, 8, 1, 1))
    for widening, width, count, stride in table:
        for k in range(count):
            layers.append(InvertedResidual(channels, width, stride if k == 0 else 1, widening))
            channels = width
    layers += _normalised(channels, 12, 1, activation=nn.ReLU6(inplace=True))
    return Classifier(nn.Sequential(*layers), 12)


class UNet(nn.Module):
    """Four levels down, which are tiled, and four up, which read what each level made."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 5, 6, 8)
        befores = (3, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(
                *_normalised(before, after, activation=nn.ReLU(inplace=True)),
                *_normalised(after, after, activation=nn.ReLU(inplace=True)),
            )
            for before, after in zip(befores, widths, strict=True)
        )
        self.bottom = nn.Sequential(*_normalised(8, 10, activation=nn.ReLU(inplace=True)))
        self.up = nn.ModuleList(
            nn.Conv2d(above + width, width, 3, padding=1)
            for above, width in zip((10, *widths[:0:-1]), widths[::-1], strict=True)
        )
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for level, skip in zip(self.up, reversed(kept), strict=True):
            x = functional.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = torch.relu(level(torch.cat([x, skip], 1)))
        out: Tensor = self.head(x).mean((2, 3))
        return out


class SixUnits(nn.Module):
    """Six convolutions, no two alike, with what stands between them; a residual over three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 5, stride=2, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dilated = nn.Conv2d(4, 6, 3, padding=2, dilation=2)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.middle_norm = nn.BatchNorm2d(6, affine=False)
        self.even = nn.Conv2d(6, 6, (2, 4), padding="same")
        self.grouped = nn.Conv2d(6, 8, 3, padding=(0, 1), groups=2)
        self.slope = nn.PReLU(8)
        self.last = nn.Conv2d(8, 6, (1, 3), stride=(1, 2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.first(x)), inplace=True)
        y = functional.silu(self.dilated(x))
        z = self.middle_norm(self.depthwise(y)) + y
        z = functional.max_pool2d(z, 3, 2, 1, ceil_mode=True)
        w = z * torch.sigmoid(self.even(z))
        w = self.slope(self.grouped(w))
        w = functional.avg_pool2d(w, 3, 1, 1, count_include_pad=False)
        out: Tensor = self.head(functional.gelu(self.last(w)).mean((2, 3)))
        return out


@dataclass(frozen=True, slots=True)
class Example:
    """A network and the size of the images that it is tried with: not divisible by most grids.

    Attributes:
        height, width: even the last map has more positions than the largest grid has tiles.
    """

    build: Callable[[], nn.Module]
    height: int
    width: int


EXAMPLES = {
    "yolov2": Example(yolo, 98, 114),
    "vgg16": Example(vgg, 130, 164),
    "resnet18": Example(resnet, 262, 294),
    "mobilenetv2": Example(mobilenet, 74, 90),
    "unet": Example(UNet, 82, 90),
    "six": Example(SixUnits, 58, 66),
}
