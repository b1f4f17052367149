"""The rivals' process group: gloo over the device's own cable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tools.bench.worker.channel import Round, timed

PORT = 29_517
TRY_SECONDS = 60.0
"""After so long no further settings are tried."""
_ROUNDS_OF_A_TRY = 2


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
