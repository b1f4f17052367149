"""torch.distributed.pipelining over gloo: 1F1B, one stage a device.

The model is traced by `pipeline()` and cut before the blocks that the benchmark has chosen by
measured time and device speed. Shapes are fixed when it is traced, so each micro-batch tried has a
trace of its own, made before anything is timed; a round of each decides which one is measured.
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
from tools.bench.worker.channel import Channel
from tools.bench.worker.samples import Samples, optimizer_of
from tools.bench.worker.stopwatch import run_rounds, timed

_CPU = torch.device("cpu")


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
        """Forwards, backwards and the update."""
        chosen = self._samples.of_round(number)
        losses: list[Tensor] = []
        if self._rank == 0:
            self._schedule.step(self._samples.inputs[chosen])
        elif self._rank == self._world - 1:
            self._schedule.step(target=self._samples.targets[chosen], losses=losses)
            self.losses.append(sum(loss.item() for loss in losses) / len(losses))
        else:
            self._schedule.step()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss_of(self, logits: Tensor, target: Tensor) -> Tensor:
        return self._loss(_Output(logits), target)


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Choose the micro-batch by a round each, then run whole rounds with it."""
    training = models.load(task["model"])
    samples = Samples.make(training, task["batch_size"])
    model = _Logits(training.build())
    traces = {size: _trace(task, model, samples, size) for size in task["micro_batches"]}
    del model
    channel.ready()
    group.join(task)
    tried = {size: _try(task, size, traced, samples) for size, traced in traces.items()}
    best = min(tried, key=tried.__getitem__)
    chosen = _Pipeline(task, best, traces[best], samples)
    seconds = run_rounds(channel, chosen.one_round, task["warm"], task["steady"])
    losses = chosen.losses
    channel.say("measured", seconds=seconds, losses=losses, micro_batch=best, tried=tried)
    dist.barrier()
    dist.destroy_process_group()


def _trace(task: Mapping[str, Any], model: nn.Module, samples: Samples, size: int) -> _Traced:
    cuts: Sequence[str] = task["cuts"]
    split = {f"model.{name}": SplitPoint.BEGINNING for name in cuts}
    whole = pipeline(copy.deepcopy(model), (samples.inputs[:size],), split_spec=split)
    module = whole.get_stage_module(task["rank"])
    beginning = {name: value.clone() for name, value in module.state_dict().items()}
    return _Traced(module, whole.info(), beginning)


def _try(task: Mapping[str, Any], size: int, traced: _Traced, samples: Samples) -> float:
    """Seconds of the second round, the slowest device's."""
    tried = _Pipeline(task, size, traced, samples)
    tried.one_round(0)
    dist.barrier()
    seconds = torch.tensor([timed(lambda: tried.one_round(1))], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds.item())
