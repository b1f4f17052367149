"""Plain torch on one device: the loop that a user without p2ptrain would write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tools.bench import models
from tools.bench.worker.channel import Channel
from tools.bench.worker.samples import Samples, optimizer_of
from tools.bench.worker.stopwatch import run_rounds


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Whole rounds with gradients accumulated over micro-batches."""
    training = models.load(task["model"])
    samples = Samples.make(training, task["batch_size"])
    model = training.build()
    optimizer = optimizer_of(model)
    losses: list[float] = []

    def one_round(number: int) -> None:
        chosen = samples.of_round(number)
        losses.append(0.0)
        for inputs, targets in samples.pieces(chosen, task["micro_batch"]):
            loss = training.loss(model(inputs), targets) * (len(targets) / len(chosen))
            torch.autograd.backward(loss)
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()

    channel.ready()
    seconds = run_rounds(channel, one_round, task["warm"], task["steady"])
    channel.say("measured", seconds=seconds, losses=losses)
