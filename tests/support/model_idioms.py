"""What people write in forward(), one thing a model: each was refused or taken wrongly once.

Or is one of a broad sample that never was. All are trained on several devices' worth of stages, and
measured as devices measure a model that they have not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.support.zoo import Made

STEPS, WIDE = 6, 8


class Between(nn.Module):
    """A layer, something, and a layer, over (batch, 6, 8)."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.f(torch.tanh(self.first(x))))
        return made.flatten(1, -2).mean(1)


class Packed(nn.Module):
    """Sequences of different lengths through a recurrent layer."""

    def __init__(self, kind: Any, ends: str, batch_first: bool, ordered: bool, **more: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(12, WIDE)
        self.inner = nn.Linear(WIDE, WIDE)
        self.layer = kind(WIDE, 6, batch_first=batch_first, **more)
        made = more.get("proj_size", 6) * (2 if more.get("bidirectional") else 1)
        self.out = nn.Linear(made, WIDE)
        self.ends, self.batch_first, self.ordered = ends, batch_first, ordered

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        x = torch.tanh(self.inner(self.words(words)))
        if self.ordered:
            lengths, order = lengths.sort(descending=True)
            x = x[order]
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(
            x, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=self.ordered
        )
        results, states = self.layer(packed)
        if self.ends == "state":
            state = states[0] if isinstance(states, tuple) else states
            return self.out(torch.cat([*state[-2:]], 1) if self.layer.bidirectional else state[-1])
        total = STEPS if self.ends == "all" else None
        x, found = pad_packed_sequence(results, batch_first=self.batch_first, total_length=total)
        x = x if self.batch_first else x.transpose(0, 1)
        if self.ends == "last":
            return self.out(x[torch.arange(x.size(0)), found - 1])
        return self.out(x).sum(1) / found[:, None]


class Penalised(nn.Module):
    """The slope of a network in its inputs, as a critic's penalty or an equation's residual has it.

    And a constant slope in a weight.
    """

    def __init__(self, norm: nn.Module, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        parts = (nn.Linear(WIDE, WIDE), nn.Tanh(), norm, nn.Softmax(-1), nn.SiLU())
        self.critic = nn.Sequential(nn.Conv1d(STEPS, STEPS, 3, padding=1), *parts)
        self.last = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        score = self.critic(x).sum((1, 2))
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        if self.twice:
            (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            slope = slope + bend
        out = self.last(torch.tanh(slope)).mean(1)
        weight = self.last.weight
        (constant,) = torch.autograd.grad(out.square().mean(), weight, retain_graph=True)
        return out - functional.linear(out, constant * weight)


class Derived(nn.Module):
    """Derivatives through checkpoints, and under `no_grad`, which plain torch follows all the same.

    And a weight that is cast where there are no gradients, then used where there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.cast = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return torch.tanh(self.first(x)).square()

        def slope(x: Tensor) -> Tensor:
            (made,) = torch.autograd.grad(energy(x).sum(), x, create_graph=True)
            return made

        x = torch.tanh(self.last(x.mean(1)))
        whole = checkpoint(energy, x, use_reentrant=False).sum()
        with torch.no_grad():
            (through,) = torch.autograd.grad(whole, x, create_graph=True)
        with torch.autograd.graph.save_on_cpu():
            x = through * x + checkpoint(slope, x, use_reentrant=False)
        with torch.autocast("cpu"):
            with torch.no_grad():
                seen = self.cast(x)
            return (self.cast(x) * seen).float()


class Adapting(nn.Module):
    """Classifies after a step of an inner training, as learning to learn does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.mean(1)))
        labels = x.detach().argmax(1)
        scores = self.last(x)
        inner = functional.cross_entropy(scores, labels) + functional.huber_loss(scores, x)
        inner = inner + functional.smooth_l1_loss(scores, x) - functional.logsigmoid(scores).mean()
        (slope,) = torch.autograd.grad(inner, self.last.weight, create_graph=True)
        scores = functional.linear(x, self.last.weight - slope)
        return scores * functional.cross_entropy(scores, labels)


class Turned(nn.Module):
    """A weight that is turned over once, for a product and for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.mean(1)))
        turned = self.last.weight.t()
        return torch.addmm(self.last.bias, x, turned) + turned.square().sum(0)


class Codebook(nn.Module):
    """The nearest of some vectors, which follow the data by way of `.data`."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDE, 4), nn.Linear(4, WIDE)
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=False)
        self.register_buffer("counts", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.encode(x.mean(1)))
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = functional.one_hot(nearest, 5).float()
        if self.training:
            self.counts.data = self.counts.data * 0.9 + chosen.sum(0) * 0.1
            self.codes.data.mul_(0.9).add_(chosen.T @ x.detach(), alpha=0.05)
        quantised = self.codes[nearest]
        out: Tensor = self.decode(x + (quantised - x).detach()) * self.counts.sum()
        return out


class Kept(nn.Module):
    """Two equal tensors of its own that are written to; a buffer that grows, a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.mean, self.count = torch.zeros(WIDE), torch.zeros(WIDE)
        self.register_buffer("places", torch.zeros(0, WIDE), persistent=False)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[0] < x.shape[1]:
            self.places = torch.arange(x.shape[1] * 8.0).view(-1, WIDE) / 50
        if self.cache is None:
            self.cache = torch.full((WIDE,), 0.5)
        x = self.first(x + self.places[: x.shape[1]])
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
        self.count.add_(1)
        out: Tensor = self.last(x - self.mean).mean(1) * self.cache + self.count
        return out


class Complex(nn.Module):
    """Complex layers, and a complex number."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDE, WIDE, dtype=torch.complex64) for _ in range(3)]
        self.layers, self.last = nn.ModuleList(layers), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        wave = x.mean(1) + 0.5j
        for layer in self.layers:
            wave = torch.tanh(layer(wave))
        out: Tensor = self.last(wave.real)
        return out


class Experts(nn.Module):
    """A mixture of experts as transformers computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(WIDE, 3), nn.Linear(WIDE, WIDE)
        self.matrices = nn.Parameter(torch.randn(3, WIDE, WIDE) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        share, chosen = (found[:, 0] for found in self.gate(rows).softmax(1).topk(1))
        share /= share + 1.0
        order = chosen.argsort(stable=True)
        ends = torch.histc(chosen.float(), 3, 0, 2).cumsum(0, dtype=torch.int32)
        made = functional.grouped_mm(rows[order], self.matrices, offs=ends)
        made = torch.empty_like(made).index_copy(0, order, made)
        out: Tensor = self.last(torch.tanh(made * share[:, None])).view_as(x).mean(1)
        return out


class Drawing(nn.Module):
    """Random numbers of a generator of its own, and of distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + torch.randn(WIDE, generator=self.generator)
        share = torch.distributions.Beta(1.0, 1.0).sample()
        x = share * x + (1 - share) * x.flip(0)
        x = torch.distributions.Gamma(functional.softplus(x) + 0.1, 1.0).rsample()
        out: Tensor = self.last(x).mean(1)
        return out


@torch.inference_mode()
def _largest(x: Tensor) -> Tensor:
    return x.amax((0, 1))


def _centred(x: Tensor) -> Tensor:
    """Statistics without gradients, but for some inside."""
    with torch.inference_mode():
        mean = x.mean((0, 1))
        with torch.inference_mode(False):
            again = torch.tanh(x)
    return x - mean.clone() + _largest(x).clone() + again


@torch.autocast("cpu", dtype=torch.bfloat16)
def _cast(x: Tensor) -> Tensor:
    """A product and, where it is switched off, none in bfloat16."""
    y = x @ x.mT
    with torch.autocast("cpu", enabled=False):
        z = (y.float() @ x).cumsum(1)
    return z * 0.1 + functional.softmax(y @ x, dim=1)


class CastInside(nn.Module):
    """Operators that autocast casts the insides of, and a recurrent layer that it is kept from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.matrix = nn.Linear(WIDE, WIDE), nn.Parameter(torch.randn(WIDE, WIDE) / 4)
        self.cell = nn.GRUCell(WIDE, WIDE)
        self.layer = nn.LSTM(WIDE, 6, num_layers=2, bidirectional=True, proj_size=4)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).float()
        x = torch.einsum("bij,jk->bik", x, self.matrix) + torch.inner(x, self.matrix)
        square = torch.linalg.matrix_power(self.matrix, 2)
        state = self.cell(x[:, 0].float()) + torch.tensordot(x[:, 1], square, 1)
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float().transpose(0, 1))[0][-1] + state


def _mapped(x: Tensor) -> Tensor:
    """Over samples, and over the steps of each, which are cast."""

    def sample(steps: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return torch.vmap(lambda step: steps.T @ (steps @ step))(steps)

    return torch.vmap(sample)(x).float()


class Ensemble(nn.Module):
    """One architecture with three models' weights at once; a layer of its own used twice, cast."""

    def __init__(self) -> None:
        super().__init__()
        models = [nn.Linear(WIDE, WIDE) for _ in range(3)]
        weights, _ = torch.func.stack_module_state(models)
        self.weights = nn.ParameterDict({k: nn.Parameter(v) for k, v in weights.items()})
        self.twice, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.kept = {"shape": models[0].to("meta")}

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x.mean(1))
        with torch.autocast("cpu"):
            x = self.twice(torch.relu(self.twice(x))).float()

        def call(weights: Any, x: Tensor) -> Any:
            return torch.func.functional_call(self.kept["shape"], weights, (x,))

        out = torch.vmap(call, in_dims=(0, None))(dict(self.weights), x)
        made: Tensor = self.last(torch.tanh(out).mean(0))
        return made


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1),
    "two_views": lambda x: torch.cat([x, x * 2]).chunk(2)[1] + torch.cat([x, x]).chunk(2)[0],
    "checkpoint_of_views": lambda x: checkpoint(
        torch.tanh, torch.cat([x, x * 2]).chunk(2)[1], use_reentrant=True
    ),
    "split_views": lambda x: torch.cat([x, x * 2]).split(x.shape[0])[1] * 3,
    "special": lambda x: torch.special.ndtr(x) + torch.special.i1e(x),
    "data": lambda x: x + x.data * 0.1,
    "scatter": lambda x: torch.zeros_like(x).scatter_add_(1, x.argsort(1), x),
    "top": lambda x: x.topk(3, dim=1).values + x.sort(dim=1).values[:, :3],
    "masks": lambda x: torch.where(x > 0, x, x.exp() - 1).masked_fill(x > 0.5, -1.0),
    "fourier": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 0.5).real,
    "solve": lambda x: torch.linalg.solve(x.mT @ x + torch.eye(WIDE), x.mT).mT,
    "windows": lambda x: x.unfold(1, 3, 1).mean(-1),
    "norms": lambda x: functional.rms_norm(x, (WIDE,)) + functional.normalize(x, dim=-1),
    "inference_mode": _centred,
    "autocast": _cast,
    "mapped": _mapped,
    "mapped_dropout": lambda x: torch.vmap(functional.dropout, randomness="different")(x),
    "length": lambda x: x * len(x) + torch.arange(len(x))[:, None, None],
    "straight_through": lambda x: x + (x.round() - x).detach(),
}

_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda f=f: Between(f) for name, f in _FUNCTIONS.items()},
    "codebook": Codebook,
    "kept": Kept,
    "complex": Complex,
    "experts": Experts,
    "ensemble": Ensemble,
    "turned": Turned,
    "penalised": lambda: Penalised(nn.LayerNorm(WIDE), twice=False),
    "penalised_twice": lambda: Penalised(nn.Identity(), twice=True),
    "derived": Derived,
    "adapting": Adapting,
    "drawing": Drawing,
    "cast_inside": CastInside,
    "packed_projected": lambda: Packed(nn.LSTM, "mean", True, True, proj_size=3),
    "packed_lstm": lambda: Packed(nn.LSTM, "state", True, False),
    "packed_gru": lambda: Packed(nn.GRU, "last", True, False),
    "packed_rnn": lambda: Packed(nn.RNN, "mean", True, True),
    "packed_deep": lambda: Packed(nn.LSTM, "all", False, False, num_layers=2, bidirectional=True),
}
NAMES = tuple(_MODELS)


def make(name: str, samples: int = 8) -> Made:
    """The model of that name with seeded weights and samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = _MODELS[name]()
        data = [_packed() if "packed" in name else _plain() for _ in range(samples)]
        return Made(name, model, data, _gaussian if name == "data" else mse_loss)


def _gaussian(output: Tensor, target: Tensor) -> Tensor:
    """Looks at whether a variance is negative."""
    return functional.gaussian_nll_loss(output, target, functional.softplus(output))


def _plain() -> tuple[Any, Any]:
    return torch.randn(STEPS, WIDE), torch.randn(WIDE)


def _packed() -> tuple[Any, Any]:
    words, length = torch.randint(12, (STEPS,)), torch.randint(1, STEPS + 1, ())
    return (words, length), torch.randn(WIDE)
