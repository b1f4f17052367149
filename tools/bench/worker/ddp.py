"""torch DistributedDataParallel over gloo, each device with a share of the mini-batch.

Shares are by measured speed; gradients are exchanged once a round (`no_sync` before the last
micro-batch, whose backward overlaps the all-reduce), without broadcasts of buffers. The task names
settings to try, as a careful user would, for a round each; the fastest is measured.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tools.bench import models
from tools.bench.models import Training
from tools.bench.worker.channel import Channel, Round, Samples, optimizer_of, run_rounds, timed

PORT = 29_517
TRY_SECONDS = 60.0
"""After so long no further settings are tried."""
_ROUNDS_OF_A_TRY = 2


@dataclass(frozen=True, slots=True)
class _Setting:
    """One way to run it.

    Attributes:
        micro_batch: the most samples of a forward on this device.
        bucket_mb: how much of the gradients is exchanged at once.
    """

    micro_batch: int
    bucket_mb: float


class _Replica:
    """The model on this device, from its beginning, with its part of every mini-batch."""

    def __init__(
        self, task: Mapping[str, Any], setting: _Setting, training: Training, samples: Samples
    ) -> None:
        self._task, self._setting = task, setting
        self._loss, self._samples = training.loss, samples
        self._parallel = DistributedDataParallel(
            training.build(),
            broadcast_buffers=False,
            bucket_cap_mb=setting.bucket_mb,
            gradient_as_bucket_view=True,
        )
        self._optimizer = optimizer_of(self._parallel)
        self.losses: list[float] = []

    def one_round(self, number: int) -> None:
        """Forwards, backwards, the exchange and the update."""
        first, end = self._task["first_sample"], self._task["end_sample"]
        own = self._samples.of_round(number)[first:end]
        pieces = list(self._samples.pieces(own, self._setting.micro_batch))
        part = torch.zeros(())
        for index, (inputs, targets) in enumerate(pieces):
            last = index == len(pieces) - 1
            with contextlib.nullcontext() if last else self._parallel.no_sync():
                loss = self._loss(self._parallel(inputs), targets)
                weight = len(targets) / self._samples.batch_size
                # The all-reduce divides by the world.
                torch.autograd.backward(loss * weight * self._task["world"])
            part.add_(loss.detach(), alpha=weight)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(part.item())


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Whole rounds; every device reports its seconds, and its part of each round's loss."""
    training = models.load(task["model"])
    samples = Samples.make(training, task["batch_size"])
    channel.ready()
    join(task)
    settings = [_Setting(**setting) for setting in task["settings"]]
    tried = _try_each(task, settings, training, samples)
    best = tried.index(min(tried)) if tried else 0
    replica = _Replica(task, settings[best], training, samples)
    seconds = run_rounds(channel, replica.one_round, task["warm"], task["steady"])
    channel.say(
        "measured", seconds=seconds, losses=replica.losses, chosen=best, seconds_of_tries=tried
    )
    dist.destroy_process_group()


def _try_each(
    task: Mapping[str, Any], settings: Sequence[_Setting], training: Training, samples: Samples
) -> list[float]:
    """Seconds of a round with each setting that there is time for; of none where it is the only."""
    tried: list[float] = []
    while len(settings) > 1 and try_more(tried, len(settings)):
        replica = _Replica(task, settings[len(tried)], training, samples)
        tried.append(slowest_seconds(replica.one_round))
        del replica
        gc.collect()  # a replica and its reducer name each other
    return tried


def join(task: Mapping[str, Any]) -> None:
    """Join the others; `task` names this device's rank, the world and the first one's address."""
    os.environ["GLOO_SOCKET_IFNAME"] = _interface(task["address"])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{task['first_address']}:{PORT}",
        rank=task["rank"],
        world_size=task["world"],
        timeout=timedelta(seconds=600),
    )


def try_more(tried: Sequence[float], settings: int) -> bool:
    """Whether another of so many settings is to be tried; the same answer on every device."""
    return len(tried) < settings and _ROUNDS_OF_A_TRY * sum(tried) < TRY_SECONDS


def slowest_seconds(run: Round) -> float:
    """Seconds of the second of two rounds, as long as they are on the slowest device."""
    run(0)
    dist.barrier()
    seconds = torch.tensor([timed(lambda: run(1))], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds.item())


def _interface(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            return str(name)
    raise RuntimeError(f"no interface has the address {address}")
