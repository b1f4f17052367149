"""What numbers too small to be normal cost a model, and what it loses without them.

    python -m tools.denormals [--models efficientnet_b1 vit] [--batch 16] [--steps 15]

Plain torch, one thread, the models of `tools/bench`: trained on one batch as it is, and with such
numbers taken for zero, as devices of p2ptrain take them. Processor seconds of both, whether the
losses are the same to the bit, and by how much the trained weights differ at most.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.bench.cells import MODELS
from tools.bench.models import load

RATE, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True, slots=True)
class _Trained:
    """What came of a training."""

    losses: list[float]
    state: dict[str, Tensor]
    seconds: float


def main() -> None:
    """Print a line a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch", type=int, default=16, help="samples (default: 16)")
    parser.add_argument("--steps", type=int, default=15, help="updates (default: 15)")
    wishes = parser.parse_args()
    if not torch.set_flush_denormal(False):
        parser.exit(1, "this processor cannot take such numbers for zero\n")
    torch.set_num_threads(1)
    for name in wishes.models:
        print(f"{name:18} {_compared(name, wishes.batch, wishes.steps)}", flush=True)


def _compared(name: str, batch: int, steps: int) -> str:
    as_is = _train(name, batch, steps)
    torch.set_flush_denormal(True)
    flushed = _train(name, batch, steps)
    torch.set_flush_denormal(False)
    same = "the same losses" if as_is.losses == flushed.losses else "OTHER LOSSES"
    apart = max(
        float((tensor.double() - flushed.state[key].double()).abs().max())
        for key, tensor in as_is.state.items()
    )
    ratio = as_is.seconds / flushed.seconds
    seconds = f"{as_is.seconds:6.2f} s, without {flushed.seconds:6.2f} s ({ratio:.2f})"
    return f"{seconds}, {same}, weights differ by at most {apart:.1e}"


def _train(name: str, batch: int, steps: int) -> _Trained:
    training = load(name)
    model = training.build().train()
    inputs, targets = training.data(batch).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses = []
    begin = time.thread_time()
    for _ in range(steps):
        loss = training.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _Trained(losses, model.state_dict(), time.thread_time() - begin)


if __name__ == "__main__":
    main()
