"""One device: how fast it is by itself, its part of `aggregate`, and plain torch's rounds on it.

All devices of a household are measured at the same time, as they share this machine's caches and
cores' halves in every other measurement too. Who is done works on until the last one is.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from tools.bench import models
from tools.bench.worker.channel import Channel, Samples, optimizer_of, run_rounds, timed

SIZES = (4, 8, 16, 32, 64, 128, 256)
"""Micro-batches tried, until larger ones do not pay."""
LONGEST_PIECE_SECONDS = 20.0
MEMORY_PART = 0.9
"""Of a device's memory, that a larger micro-batch may be expected to need."""
SEARCH_SECONDS, MEASURE_SECONDS = 1.0, 12.0
PAYS = 1.02
UPDATES = 3


class Device:
    """A model in training on this device, by the micro-batch."""

    def __init__(self, model: str) -> None:
        self._training = models.load(model)
        self._samples = Samples.make(self._training, SIZES[-1])
        self._model = self._training.build()
        self._optimizer = optimizer_of(self._model)

    def piece(self, size: int) -> None:
        """Forward and backward of `size` samples."""
        output = self._model(self._samples.inputs[:size])
        torch.autograd.backward(self._training.loss(output, self._samples.targets[:size]))

    def update(self) -> None:
        """One update of the weights."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def piece_seconds(self, size: int, at_least: float) -> float:
        """Mean seconds of a micro-batch, the first left out, over at least that time."""
        self.piece(size)
        begin, count = perf_counter(), 0
        while count < 2 or perf_counter() - begin < at_least:
            self.piece(size)
            count += 1
        return (perf_counter() - begin) / count


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Search unless that is known, measure with the others, work on until asked to stop."""
    device = Device(task["model"])
    channel.ready()
    known = task["seconds_by_size"]
    sizes = known or _search(device, task["largest"], task["memory_bytes"])
    device.update()  # makes the optimizer's state
    channel.say("searched", seconds_by_size=sizes)
    best = channel.wait()["micro_batch"]
    piece_seconds = device.piece_seconds(best, MEASURE_SECONDS)
    update_seconds = min(_update_seconds(device, best) for _ in range(UPDATES))
    channel.say("measured", piece_seconds=piece_seconds, update_seconds=update_seconds)
    while not channel.has_news():
        device.piece(best)


def _search(device: Device, largest: int, memory_bytes: int | None) -> dict[int, float]:
    """Seconds of a micro-batch by its size, until two in a row have not paid or memory is short."""
    sizes: dict[int, float] = {}
    idle_bytes = _peak_bytes()
    best, in_vain = float("inf"), 0
    for size in (size for size in SIZES if size <= largest):
        sizes[size] = device.piece_seconds(size, SEARCH_SECONDS)
        of_a_sample = sizes[size] / size
        in_vain = 0 if PAYS * of_a_sample < best else in_vain + 1
        best = min(best, of_a_sample)
        of_twice = idle_bytes + 2 * (_peak_bytes() - idle_bytes)
        fits = memory_bytes is None or of_twice < MEMORY_PART * memory_bytes
        if in_vain == 2 or 2 * sizes[size] > LONGEST_PIECE_SECONDS or not fits:
            break
    return sizes


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _update_seconds(device: Device, size: int) -> float:
    device.piece(size)
    return timed(device.update)


def run_plain(task: Mapping[str, Any], channel: Channel) -> None:
    """Whole rounds with gradients accumulated over micro-batches, as in a user's own loop."""
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
