"""The zoo's own architectures: one for each way in which a graph can be more than a chain."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


def multilayer_perceptron(features: int, classes: int, dropout: float = 0.0) -> nn.Module:
    """A chain; with `dropout`, randomness in two places."""
    layers: list[nn.Module] = []
    for k, width in enumerate((32, 48, 32, 24)):
        layers += [nn.Linear(features, width), nn.ReLU()]
        if dropout and k % 2 == 0:
            layers.append(nn.Dropout(dropout))
        features = width
    return nn.Sequential(*layers, nn.Linear(features, classes))


class ConvNet(nn.Module):
    """Convolutions with batch normalisation, whose running statistics are state too."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            self._block(3, 8), self._block(8, 12), nn.MaxPool2d(2), self._block(12, 16)
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(16 * 4, classes)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return out


class ResidualBlock(nn.Module):
    """x + f(x): two tensors cross any cut inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class ResidualNet(nn.Module):
    """Residual blocks between a stem and a head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(8) for _ in range(3)])
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class UNet(nn.Module):
    """Long skips: a value made early is used late, so it crosses every cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 6, 3, padding=1)
        self.down2 = nn.Conv2d(6, 10, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(10, 10, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(10, 6, 2, stride=2)
        self.up1 = nn.Conv2d(12, 6, 3, padding=1)
        self.out = nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(first))
        second = second + torch.relu(self.middle(second))
        joined = torch.cat([first, torch.relu(self.up2(second))], dim=1)
        out: Tensor = self.out(torch.relu(self.up1(joined)))
        return out


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(tokens, tokens).tril().bool(), persistent=False)
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        joined = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = joined.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, tokens, width)
        out: Tensor = self.out(mixed)
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, tokens)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed(self.norm2(x))
        return out


class TinyGPT(nn.Module):
    """The embedding and the head share one weight, at the two ends of the model."""

    def __init__(self, vocabulary: int, tokens: int, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.ModuleList([TransformerBlock(width, 2, tokens) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class TwoInputs(nn.Module):
    """model(left, right); the right one is used only near the end."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.join = nn.Bilinear(16, 6, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.join(self.left(left), right)))
        return out


class NamedInputs(nn.Module):
    """model(left=..., right=..., scale=...), in another order than the data's keys."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.left = nn.Linear(8, 16)
        self.right = nn.Linear(6, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, scale: Tensor, right: Tensor, left: Tensor) -> Tensor:
        mixed = torch.tanh(self.left(left)) * scale + torch.tanh(self.right(right))
        out: Tensor = self.head(mixed)
        return out


class FrozenBackbone(nn.Module):
    """Transfer learning: the first half has no gradients, the norm's own statistics still move."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.out = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.head(self.backbone(x)).flatten(1))
        return out


def frozen_layers(inputs: int, classes: int) -> nn.Sequential:
    """So many of them that some stage has nothing that an update changes."""
    layers = [nn.Linear(inputs, inputs) for _ in range(8)]
    for layer in layers[:6]:
        layer.requires_grad_(False)
    return nn.Sequential(
        *(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(inputs, classes)
    )


class Halves(NamedTuple):
    """What an inner module returns."""

    low: Tensor
    high: Tensor


class Splitter(nn.Module):
    """Returns a named tuple."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 2 * width)

    def forward(self, x: Tensor) -> Halves:
        return Halves(*self.linear(x).chunk(2, dim=-1))


class Gate(nn.Module):
    """Takes the tuple, returns a dict with a list in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, halves: Halves) -> dict[str, Tensor | list[Tensor]]:
        gated = halves.low * torch.sigmoid(self.linear(halves.high))
        return {"value": gated, "rest": [halves.low, halves.high]}


class InnerStructures(nn.Module):
    """Tuples, lists and dicts between modules, an unused parameter, and a dict as output."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.split = Splitter(12, 16)
        self.gate = Gate(16)
        self.head = nn.Linear(16, classes)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        gated = self.gate(self.split(x))
        low, high = gated["rest"]
        return {"logits": self.head(gated["value"] + low), "penalty": high.pow(2)}
