"""A worker's conversation with the benchmark, the samples of its rounds, and their seconds.

JSON lines on stdin and stdout. Samples come in the order that p2ptrain documents, so that losses
can be compared; they lie in memory on every device: no rival spends time on fetching data.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from tools.bench.models import Training

LEARNING_RATE, MOMENTUM = 0.01, 0.9
BATCHES = 2

Round = Callable[[int], None]


class Channel:
    """Keeps stdout for itself: what libraries print goes to stderr from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, event: str, **fields: object) -> None:
        """One line."""
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()

    def wait(self) -> dict[str, Any]:
        """The next line of the other side. Raises EOFError where it is gone."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError("the benchmark has gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def ready(self) -> dict[str, Any]:
        """Say that everything is loaded, and wait for what to do."""
        self.say("ready")
        return self.wait()

    @staticmethod
    def has_news() -> bool:
        """Whether `wait` would return at once."""
        return bool(select.select([sys.stdin], [], [], 0)[0])


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


def even_pieces(total: int, largest: int) -> list[int]:
    """`total` in as few pieces of at most `largest` as possible, as equal as possible."""
    count = -(-total // largest)
    return [total // count + (i < total % count) for i in range(count)]


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = perf_counter()
    action()
    return perf_counter() - begin


def run_rounds(channel: Channel, run: Round, warm: int, steady: int) -> list[float]:
    """Run `warm` rounds, say `steady`, then run those that count; seconds of these."""
    for number in range(warm):
        run(number)
    channel.say("steady")
    return [timed(lambda n=number: run(n)) for number in range(warm, warm + steady)]  # type: ignore[misc]
