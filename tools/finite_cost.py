"""What it costs to know before an update counts that it is finite.

    python -m tools.finite_cost [--models efficientnet_b1 vit] [--batch 16] [--steps 15]

Plain torch, one thread, the models of `tools/bench` with SGD: processor seconds of whole steps, and
of what a stage looks at in each (`p2ptrain.model.stage.finite`), in the same run.
"""

from __future__ import annotations

import argparse
import time

import torch

from p2ptrain.model.stage.finite import Broken, FiniteUpdates
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_spec import SGD
from tools.bench.cells import MODELS
from tools.bench.models import load


def main() -> None:
    """Print a line a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch", type=int, default=16, help="samples (default: 16)")
    parser.add_argument("--steps", type=int, default=15, help="updates (default: 15)")
    wishes = parser.parse_args()
    torch.set_num_threads(1)
    for name in wishes.models:
        print(f"{name:18} {_measured(name, wishes.batch, wishes.steps)}", flush=True)


def _measured(name: str, batch: int, steps: int) -> str:
    training = load(name)
    model = training.build().train()
    inputs, targets = training.data(batch).tensors
    optimizer = StageOptimizer(SGD(lr=0.01, momentum=0.9), dict(model.named_parameters()))
    written = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    finite = FiniteUpdates(optimizer, written)
    step_seconds = look_seconds = 0.0
    for step in range(steps + 2):
        started = time.thread_time()
        training.loss(model(inputs), targets).backward()
        looked = time.thread_time()
        norm = finite.gradient_norm(optimizer.gradients())
        assert not isinstance(norm, Broken)
        if finite.broken_buffer() is None and not finite.is_safe(norm, 1.0):
            finite.look()
        done = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        ended = time.thread_time()
        if step >= 2:  # the first ones take memory
            look_seconds += done - looked
            step_seconds += ended - started - (done - looked)
    share = look_seconds / step_seconds
    return (
        f"a step of {1e3 * step_seconds / steps:.1f} ms, looking {1e3 * look_seconds / steps:.2f} "
        f"ms: {100 * share:.2f} %"
    )


if __name__ == "__main__":
    main()
