"""torch.distributed.pipelining over gloo: 1F1B, one stage a device.

The model is traced by `pipeline()` and cut before the blocks that the benchmark has chosen by
measured time and device speed. Shapes are fixed when it is traced, so each micro-batch tried has a
trace of its own, made before anything is timed; a round of each decides which one is measured.

A model that cannot be traced and cut, or whose first round torch itself refuses, is one that it
cannot run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.distributed.pipelining.stage import build_stage

from tools.bench import models
from tools.bench.worker import group
from tools.bench.worker.channel import CannotRunError, Channel, Samples, optimizer_of, run_rounds

_CPU = torch.device("cpu")
_LOST = "gloo/transport"
"""What gloo's errors name when the other side has gone: they are plain RuntimeErrors too."""


class _Logits(nn.Module):
    """A transformers model whose output is a tensor, which is all that may leave a stage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs).logits
        return logits


@dataclass(frozen=True, slots=True)
class _Output:
    """As the models' losses read it."""

    logits: Tensor


@dataclass(slots=True)
class _Traced:
    """This device's stage for one micro-batch size."""

    module: nn.Module
    info: Any
    beginning: dict[str, Tensor]


class _Pipeline:
    """This device's part of the pipeline, for one micro-batch size."""

    def __init__(self, task: Mapping[str, Any], size: int, traced: _Traced, samples: Samples):
        self._rank, self._world = task["rank"], task["world"]
        self._samples = samples
        self._loss = models.load(task["model"]).loss
        self._traced = traced
        traced.module.load_state_dict(traced.beginning)
        self._optimizer = optimizer_of(traced.module)
        stage = build_stage(traced.module, self._rank, traced.info, _CPU)
        count = samples.batch_size // size
        self._schedule = Schedule1F1B(stage, count, loss_fn=self._loss_of)
        self.losses: list[float] = []

    def one_round(self, number: int) -> None:
        """Forwards, backwards and the update. Raises CannotRunError."""
        try:
            self._forwards_and_backwards(number)
        except RuntimeError as error:
            if number > 0 or _LOST in str(error):
                raise
            raise CannotRunError.because(error) from error
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _forwards_and_backwards(self, number: int) -> None:
        chosen = self._samples.of_round(number)
        losses: list[Tensor] = []
        if self._rank == 0:
            self._schedule.step(self._samples.inputs[chosen])
        elif self._rank == self._world - 1:
            self._schedule.step(target=self._samples.targets[chosen], losses=losses)
            self.losses.append(sum(loss.item() for loss in losses) / len(losses))
        else:
            self._schedule.step()

    def _loss_of(self, logits: Tensor, target: Tensor) -> Tensor:
        return self._loss(_Output(logits), target)


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Choose the micro-batch by a round each, then run whole rounds with it."""
    training = models.load(task["model"])
    samples = Samples.make(training, task["batch_size"])
    model = _Logits(training.build())
    sizes: Sequence[int] = task["micro_batches"]
    try:
        traces = [_trace(task, model, samples, size) for size in sizes]
    except Exception as error:  # whatever torch.export and the splitter raise
        raise CannotRunError.because(error) from error
    del model
    channel.ready()
    group.join(task)
    tried = _try_each(task, traces, samples)
    best = tried.index(min(tried)) if tried else 0
    chosen = _Pipeline(task, sizes[best], traces[best], samples)
    seconds = run_rounds(channel, chosen.one_round, task["warm"], task["steady"])
    channel.say(
        "measured", seconds=seconds, losses=chosen.losses, chosen=best, seconds_of_tries=tried
    )
    dist.barrier()
    dist.destroy_process_group()


def _trace(task: Mapping[str, Any], model: nn.Module, samples: Samples, size: int) -> _Traced:
    cuts: Sequence[str] = task["cuts"]
    split = {f"model.{name}": SplitPoint.BEGINNING for name in cuts}
    whole = pipeline(copy.deepcopy(model), (samples.inputs[:size],), split_spec=split)
    module = whole.get_stage_module(task["rank"])
    beginning = {name: value.clone() for name, value in module.state_dict().items()}
    return _Traced(module, whole.info(), beginning)


def _try_each(task: Mapping[str, Any], traces: Sequence[_Traced], samples: Samples) -> list[float]:
    """Seconds of a round with each size that there is time for; of none where it is the only."""
    sizes: Sequence[int] = task["micro_batches"]
    tried: list[float] = []
    while len(traces) > 1 and group.try_more(tried, len(traces)):
        part = _Pipeline(task, sizes[len(tried)], traces[len(tried)], samples)
        tried.append(group.slowest_seconds(part.one_round))
    return tried
