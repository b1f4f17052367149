"""Models of the benchmark and tests of accelerators, made without downloads.

Each is one `Workload`: a classifier of images whose convolutions are MobileNetV2's, a language
model of GPT-2's shape, and a perceptron. `small` ones take milliseconds on a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

import p2ptrain

READY_BATCHES = 4
"""Made before, and given again and again: what is measured is no loader."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Something to train.

    Attributes:
        make: the model, the same each time.
        batch: (number of the batch) -> inputs and targets.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    lr: float = 1e-3

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Those that are ready."""
        return [self.batch(number) for number in range(READY_BATCHES)]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain torch's."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def job(self, steps: int, micro_batch: int | None = None) -> p2ptrain.Job:
        """The same for p2ptrain; without `micro_batch` a mini-batch is one."""
        data = DataLoader(_Repeated(self.batches(), steps), batch_size=None)
        return p2ptrain.Job(
            model=self.make(),
            data=data,
            loss=self.loss,
            optimizer=p2ptrain.AdamW(lr=self.lr),
            micro_batch=micro_batch or self.batch_size,
            epochs=1,
            seed=0,
        )


class _Repeated(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, batches: list[tuple[Tensor, Tensor]], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self._count):
            yield self._batches[number % len(self._batches)]


def workloads(*, small: bool) -> list[Workload]:
    """All of them, the cheapest first."""
    return [_perceptron(small=small), _images(small=small), _language(small=small)]


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return made


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _perceptron(*, small: bool) -> Workload:
    width, depth, samples = (32, 2, 16) if small else (4096, 6, 512)

    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(samples, width, generator=_generator(number))
        return drawn, torch.arange(samples) % 10

    return Workload("perceptron", _seeded(make), batch, cross_entropy, samples)


def _images(*, small: bool) -> Workload:
    size, samples, settings = 224, 64, _MOBILENET
    if small:
        size, samples, settings = 16, 8, ((1, 8, 1, 1), (2, 12, 2, 2))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(samples, 3, size, size, generator=_generator(number))
        return drawn, torch.arange(samples) % 10

    make = _seeded(lambda: _MobileNet(settings))
    return Workload("mobilenet", make, batch, cross_entropy, samples)


_MOBILENET = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
"""Expansion, channels, blocks and first stride (Sandler et al. 2018, table 2)."""


class _MobileNet(nn.Module):
    def __init__(self, settings: tuple[tuple[int, int, int, int], ...]) -> None:
        super().__init__()
        channels = 16 if len(settings) < len(_MOBILENET) else 32
        blocks: list[nn.Module] = [_convolution(3, channels, 3, 2)]
        for expansion, out, count, stride in settings:
            for number in range(count):
                blocks.append(_Inverted(channels, out, stride if not number else 1, expansion))
                channels = out
        self.features = nn.Sequential(*blocks, _convolution(channels, 4 * channels, 1))
        self.classifier = nn.Linear(4 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return found


class _Inverted(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.passes = stride == 1 and channels == out
        self.steps = nn.Sequential(
            _convolution(channels, inner, 1),
            _convolution(inner, inner, 3, stride, groups=inner),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.steps(x)
        return x + found if self.passes else found


def _convolution(
    channels: int, out: int, size: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    padding = size // 2
    return nn.Sequential(
        nn.Conv2d(channels, out, size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU6(),
    )


def _language(*, small: bool) -> Workload:
    layers, width, heads, words, length, samples = 12, 768, 12, 50257, 256, 8
    if small:
        layers, width, heads, words, length, samples = 2, 32, 4, 64, 8, 8

    def batch(number: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(words, (samples, length + 1), generator=_generator(number))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    make = _seeded(lambda: _Gpt(layers, width, heads, words, length))
    return Workload("gpt", make, batch, _of_words, samples)


def _of_words(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


class _Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.register_buffer("order", torch.arange(length))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(self.order)
        found: Tensor = self.head(self.norm(self.blocks(x)))
        return found


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.write(self._attended(self.before(x)))
        found: Tensor = x + self.wide(self.between(x))
        return found

    def _attended(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.read(x).chunk(3, dim=-1)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).flatten(2)
