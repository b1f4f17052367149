"""A model captured and compared with itself, as before a job's first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.comparison import Comparison, compare
from p2ptrain.model.capture.plain_run import ComparedBatches, run_plainly

Batch = tuple[Any, Any]

QUICKLY = ComparedBatches(least=3, most=3)


def compared(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[Batch],
    effort: ComparedBatches = QUICKLY,
    *,
    evaluates: bool = False,
) -> Comparison:
    """What comparing on `batches` shows; raises CaptureError as it does."""

    def read(number: int, samples: int) -> Batch:
        batch: Batch = torch.utils._pytree.tree_map(
            lambda leaf: leaf[:samples], batches[number % len(batches)]
        )
        return batch

    whole = len(batches[0][1])
    run = run_plainly(model, loss, read, read if evaluates else None, range(1, whole + 1), effort)
    captured = capture(model, loss, batches[0], evaluation=evaluates)
    return compare(model, captured, run)
