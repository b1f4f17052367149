"""torch DistributedDataParallel over gloo, each device with a share of the mini-batch.

At its best: shares by measured speed, each device's best micro-batch, gradients exchanged once a
round (`no_sync` before the last micro-batch, whose backward overlaps the all-reduce), no copies
between gradients and buckets, no broadcasts of buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tools.bench import models
from tools.bench.worker import group
from tools.bench.worker.channel import Channel
from tools.bench.worker.samples import Samples, optimizer_of
from tools.bench.worker.stopwatch import run_rounds


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Whole rounds; every device reports its seconds, and its part of each round's loss."""
    training = models.load(task["model"])
    samples = Samples.make(training, task["batch_size"])
    model = training.build()
    channel.ready()
    group.join(task)
    parallel = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = optimizer_of(parallel)
    first, end = task["first_sample"], task["end_sample"]
    parts: list[float] = []

    def one_round(number: int) -> None:
        own = samples.of_round(number)[first:end]
        pieces = list(samples.pieces(own, task["micro_batch"]))
        part = torch.zeros(())
        for index, (inputs, targets) in enumerate(pieces):
            last = index == len(pieces) - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = training.loss(parallel(inputs), targets)
                weight = len(targets) / samples.batch_size
                # The all-reduce divides by the world.
                torch.autograd.backward(loss * weight * task["world"])
            part.add_(loss.detach(), alpha=weight)
        optimizer.step()
        optimizer.zero_grad()
        parts.append(part.item())

    seconds = run_rounds(channel, one_round, task["warm"], task["steady"])
    channel.say("measured", seconds=seconds, losses=parts)
    dist.destroy_process_group()
