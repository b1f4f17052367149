"""Small models, each with one thing that is easily got wrong when a model is cut or exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.support.zoo import Made

_Build = Callable[[], tuple[nn.Module, Callable[[], tuple[Any, Any]], Callable[..., Tensor]]]


class AfterLinear(nn.Module):
    """A linear layer over 8 features, then `f(x)`."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.linear(x))


class _Deep(nn.Module):
    """Five linear layers over 8 features, for subclasses to do odd things with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.between(torch.tanh(layer(x)), number)
        return x

    def between(self, x: Tensor, number: int) -> Tensor:
        return x


class ReassignedBuffer(_Deep):
    """`self.mean = ...`, a persistent one, and one that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def between(self, x: Tensor, number: int) -> Tensor:
        if number == 1 and self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count += 1
        return x - self.mean * self.count


class DecayedWeight(_Deep):
    """A weight shrinks with every forward: the next one's is another."""

    def between(self, x: Tensor, number: int) -> Tensor:
        if number == 1:
            self.layers[2].weight.data.mul_(0.9)
        return x


class ConstrainedWeight(_Deep):
    """A weight of bounded norm, as it is usual in networks for EEG."""

    def between(self, x: Tensor, number: int) -> Tensor:
        if number in (0, 2):
            layer = self.layers[number + 1]
            layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.3)
        return x


class Codebook(_Deep):
    """Entries follow what is assigned to them, once gradients have gone through them."""

    book: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(4, 8))

    def between(self, x: Tensor, number: int) -> Tensor:
        if number != 2:
            return x
        assigned = torch.softmax(x @ self.book.t(), 1)
        found = assigned @ self.book
        if self.training:
            self.book.data.mul_(0.9).add_(assigned.detach().t() @ x.detach(), alpha=0.1)
        return x + found


class InPlace(_Deep):
    """Writes into activations, into a view of one, and into its input."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        first = x
        for layer in self.layers:
            x = layer(x)
            x[:, :2] *= 2.0
            x.add_(first).relu_()
        return x


class LongSkips(_Deep):
    """One value used by three later layers, so that the order of its gradients shows."""

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.layers[0](x))
        y = skip
        for layer in self.layers[1:]:
            y = torch.tanh(layer(y)) * skip + skip / 3
        return y * skip


class SharedLayer(_Deep):
    """The second and the fourth layer are one, with a norm between them that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = self.layers[1]
        self.norm = nn.BatchNorm1d(8)

    def between(self, x: Tensor, number: int) -> Tensor:
        return self.norm(x) if number in (1, 2) else x


class ConstantParts(_Deep):
    """Masks made of the batch size and constants; regions under no_grad and without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = torch.linspace(-1, 1, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)
        mask = (rows[:, None] * 0 + self.offsets + torch.tensor([0.5] * 8)).sin()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask
            with torch.no_grad():
                scale = x.abs().mean(1, keepdim=True)
                with torch.autocast("cpu", enabled=False):
                    scale = scale.sqrt() + 1
            x = x / scale + x.detach() * 0.1
        return x


class PairwiseInBatch(_Deep):
    """A (batch, batch) matrix crosses cuts: a polynomial of degree two."""

    def forward(self, x: Tensor) -> Tensor:
        similar = torch.softmax(x @ x.T, dim=1)
        for layer in self.layers:
            x = torch.tanh(similar @ layer(x))
        return x


class FoldedBatch(_Deep):
    """Three rows a sample between the ends, as models with windows have; one layer frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        x = x[:, None, :].expand(batch, 3, 8).reshape(batch * 3, 8)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.view(batch, 3, 8).mean(1)


class Views(_Deep):
    """Slices, transposes and expanded tensors cross the cuts."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            wide = torch.cat([layer(x), x], dim=1)
            left, right = wide.chunk(2, dim=1)
            x = (left.T * right.mean(1)).T + right[:, :1].expand(-1, 8)
        return x


class ComplexWeights(_Deep):
    """Filters in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def between(self, x: Tensor, number: int) -> Tensor:
        out: Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.filters[number], n=8)
        return out


class BoundedEmbedding(_Deep):
    """The rows in use are shortened in place by every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.words(x).mean(1))


class OutputsWithConstants(_Deep):
    """The output holds an input, a flag, None and an early activation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = torch.tanh(x * self.scale)
        return {"y": super().forward(first), "x": x, "flag": True, "none": None, "first": first}


def _dict_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return mse_loss(output["y"], target) + output["first"].abs().mean()


def _regression() -> tuple[Any, Any]:
    return torch.randn(8), torch.randn(8)


def _words() -> tuple[Any, Any]:
    return torch.randint(12, (3,)), torch.randn(8)


def _image() -> tuple[Any, Any]:
    return torch.randn(3, 8, 8), torch.randint(4, ())


def _sequence() -> tuple[Any, Any]:
    return torch.randn(5, 8), torch.randint(4, ())


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def _normalised_weights() -> nn.Module:
    """Spectral norm writes its buffers through `out=`; weight norm computes weights from two."""
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8), dim=None),
        nn.Tanh(),
        nn.Linear(8, 8),
    )


def _channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.SiLU(inplace=True),
        nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return model.to(memory_format=torch.channels_last)


class _WeightedLoss(nn.Module):
    """A loss with a tensor of its own, and one in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.5, 1.0, 1.5, 2.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, self.weight, label_smoothing=0.1)


_ODD: dict[str, _Build] = {
    "reassigned_buffer": lambda: (ReassignedBuffer(), _regression, mse_loss),
    "decayed_weight": lambda: (DecayedWeight(), _regression, mse_loss),
    "constrained_weight": lambda: (ConstrainedWeight(), _regression, mse_loss),
    "codebook": lambda: (Codebook(), _regression, mse_loss),
    "in_place": lambda: (InPlace(), _regression, mse_loss),
    "long_skips": lambda: (LongSkips(), _regression, mse_loss),
    "shared_layer": lambda: (SharedLayer(), _regression, mse_loss),
    "constant_parts": lambda: (ConstantParts(), _regression, mse_loss),
    "pairwise_in_batch": lambda: (PairwiseInBatch(), _regression, mse_loss),
    "folded_batch": lambda: (FoldedBatch(), _regression, mse_loss),
    "views": lambda: (Views(), _regression, mse_loss),
    "complex_weights": lambda: (ComplexWeights(), _regression, mse_loss),
    "bounded_embedding": lambda: (BoundedEmbedding(), _words, mse_loss),
    "outputs_with_constants": lambda: (OutputsWithConstants(), _regression, _dict_loss),
    "recurrent": lambda: (_Recurrent(), _sequence, cross_entropy),
    "attention": lambda: (_Attention(), _sequence, cross_entropy),
    "normalised_weights": lambda: (_normalised_weights(), _regression, mse_loss),
    "channels_last": lambda: (_channels_last(), _image, _WeightedLoss()),
}
NAMES = tuple(_ODD)


def make(name: str, samples: int = 8) -> Made:
    """The model of that name with seeded weights and samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, sample, loss = _ODD[name]()
        return Made(name, model, [sample() for _ in range(samples)], loss)
