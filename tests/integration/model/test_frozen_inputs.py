"""A reentrant checkpoint behind which nothing is trained: torch warns, and so do we."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from p2ptrain.holder.start.prepare import prepare
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD


class Adapted(nn.Module):
    """Frozen, with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class Checkpointed(nn.Module):
    """Its blocks get no gradients, as what enters the first of them needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def test_torchs_warning_is_shown_once() -> None:
    data = [(torch.randn(8), k % 3) for k in range(16)]
    job = Job(Checkpointed(), data, cross_entropy, optimizer=SGD(lr=0.1), batch_size=8)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        prepared = prepare(job, TrainOptions(local=True))
    prepared.close()
    about = [str(one.message) for one in shown if "requires_grad=True" in str(one.message)]
    assert len(about) == 1
    units = prepared.captured.description.units
    only_the_head = [prepared.captured.description.is_forward_only(u) for u in range(len(units))]
    assert sum(only_the_head) >= 3
