"""Jobs that `--engine torch` trains, and what plain torch makes of them by the contract's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import p2ptrain


class OwnLoss(nn.Module):
    """Predicts the next of some tokens, and computes its loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embedding(tokens)))
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def pairs() -> p2ptrain.Job:
    """A dataset of pairs, a schedule and an average of the weights."""
    torch.manual_seed(1)
    x = torch.randn(66, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = {"batch_size": 22, "micro_batch": 5, "epochs": 2, "seed": 3}
    return p2ptrain.Job(model, data, cross_entropy, optimizer, **sizes)


def padded() -> p2ptrain.Job:
    """Dicts with padding, whose micro-batches weigh what they count; one rank has none of it."""
    torch.manual_seed(2)
    lengths = [int(n) for n in torch.randint(3, 9, (24,))]
    texts = [torch.randint(1, 11, (n,)) for n in lengths]

    def pad(some: list[Tensor]) -> Mapping[str, Tensor]:
        whole = nn.utils.rnn.pad_sequence
        labels = whole(some, batch_first=True, padding_value=-100)
        return {"tokens": whole(some, batch_first=True), "labels": labels}

    loader = DataLoader(texts, batch_size=8, collate_fn=pad)  # type: ignore[arg-type]
    model = OwnLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return p2ptrain.Job(model, loader, None, optimizer, micro_batch=4, epochs=2)


def groups() -> p2ptrain.Job:
    """Groups, OneCycleLR and clipping; a BatchNorm, whose statistics are added up."""
    torch.manual_seed(4)
    x = torch.randn(72, 6)
    model = nn.Sequential(
        nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3)
    )
    biases = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-3
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=6)
    data = TensorDataset(x, x.argmax(1) % 3)
    settings: dict[str, Any] = {"scheduler": scheduler, "clip_grad_norm": 0.1}
    sizes = {"batch_size": 24, "micro_batch": 6, "epochs": 2}
    return p2ptrain.Job(model, data, cross_entropy, optimizer, **sizes, **settings)


JOBS: dict[str, Callable[[], p2ptrain.Job]] = {"pairs": pairs, "padded": padded, "groups": groups}


def plain_torch(job: p2ptrain.Job) -> list[float]:
    """The curve of the contract's loop; the job's own model is trained."""
    model, optimizer = job.model.train(), job.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    losses = []
    for epoch in range(job.epochs):
        for batch in _batches(job, epoch):
            total, whole = 0.0, _count(batch)
            parts = [leaf.split(job.fixed_micro_batch) for leaf in batch.values()]
            for part in (
                dict(zip(batch, leaves, strict=True)) for leaves in zip(*parts, strict=True)
            ):
                loss = model(**part)["loss"] if job.loss is None else _scored(model, part)
                weight = _count(part) / whole
                (loss * weight).backward()
                total += loss.item() * weight
            if job.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if job.scheduler is not None:
                job.scheduler.step()
            losses.append(total)
    return losses


def _scored(model: nn.Module, part: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(part["x"]), part["y"])


def _count(batch: Mapping[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum()) if "labels" in batch else len(batch["x"])


def _batches(job: p2ptrain.Job, epoch: int) -> Iterator[dict[str, Tensor]]:
    if isinstance(job.data, DataLoader):
        torch.manual_seed(job.seed + epoch)
        yield from job.data
        return
    order = torch.randperm(len(job.data), generator=torch.Generator().manual_seed(job.seed + epoch))
    for batch in order.split(job.batch_size)[: len(job.data) // job.batch_size]:
        x, y = job.data[batch]
        yield {"x": x, "y": y}
