"""The rivals' process group: gloo over the device's own cable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

PORT = 29_517


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


def _interface(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            return str(name)
    raise RuntimeError(f"no interface has the address {address}")
