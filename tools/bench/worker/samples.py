"""The samples of each round, in the order that p2ptrain documents, so that losses can be compared.

Everything lies in memory on every device: no rival spends time on fetching data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tools.bench.models import Training
from tools.bench.shares import even_pieces

LEARNING_RATE, MOMENTUM = 0.01, 0.9
BATCHES = 2


@dataclass(frozen=True, slots=True)
class Samples:
    """Of a training with mini-batches of `batch_size`.

    Attributes:
        inputs, targets: of `BATCHES` mini-batches.
    """

    inputs: Tensor
    targets: Tensor
    batch_size: int

    @classmethod
    def make(cls, training: Training, batch_size: int) -> Samples:
        """The same on every device."""
        inputs, targets = training.data(BATCHES * batch_size).tensors
        return cls(inputs, targets, batch_size)

    def of_round(self, number: int) -> Tensor:
        """The numbers of the samples of round `number`, from 0."""
        epoch, batch = divmod(number, BATCHES)
        order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(epoch))
        return order[batch * self.batch_size : (batch + 1) * self.batch_size]

    def pieces(self, samples: Tensor, largest: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of `samples`, in micro-batches of at most `largest`."""
        for part in torch.split(samples, even_pieces(len(samples), largest)):
            yield self.inputs[part], self.targets[part]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The one that p2ptrain's job names too."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
