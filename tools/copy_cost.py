"""What copies of stages cost: processor nanoseconds a byte, step by step, over a real TLS link.

    python tools/copy_cost.py [--megabytes 120] [--rounds 5]

    copy        the stage's tensors into memory that a copy had before
    checksums   of the copy, at its owner
    travel      both ends together: manifest, reads of 2 MiB, TLS, the kernel, checksums on arrival
    link        the same less the checksums: what sending and receiving costs

Owner and keeper are two members in one process on loopback; what is counted is the process's own
time, of all its threads, so another process on the machine disturbs little. Lowest of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from p2ptrain.mesh.mesh import NetworkMesh  # noqa: E402
from p2ptrain.model.wire import copy_into  # noqa: E402
from p2ptrain.net.message import Priority  # noqa: E402
from p2ptrain.training.digests import Digest, digests_of  # noqa: E402
from p2ptrain.training.recovery.copy_pace import READ_LIMIT_BYTES  # noqa: E402
from p2ptrain.training.state_reading import StateReading, StateRequest  # noqa: E402
from p2ptrain.training.state_transfer import StateServer, in_memory  # noqa: E402
from tests.unit.mesh.household import Household, household  # noqa: E402

JOB, SOURCE = "job", "version:1:1"


@dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds a byte."""

    copy: float
    checksums: float
    travel: float
    megabytes_per_s: float

    @property
    def total(self) -> float:
        """Of a byte that is copied and kept elsewhere."""
        return self.copy + self.checksums + self.travel


def tensors(megabytes: int) -> dict[str, Tensor]:
    """As a transformer with momentum has them: matrices of a few MB, vectors beside them."""
    torch.manual_seed(0)
    named: dict[str, Tensor] = {}
    layer = 0
    while sum(tensor.nbytes for tensor in named.values()) < megabytes << 20:
        shapes = {"weight": (1024, 1024), "bias": (1024,), "norm": (1024,), "up": (1024, 512)}
        for part, shape in shapes.items():
            named[f"model:{layer}.{part}"] = torch.randn(shape)
            named[f"optimizer:{layer}.{part}.momentum_buffer"] = torch.randn(shape)
        layer += 1
    return named


async def linked(home: Household) -> tuple[NetworkMesh, NetworkMesh]:
    """Two members with a link."""
    owner, keeper = await home.start("owner"), await home.start("keeper")
    await owner.until(lambda: len(owner.mesh.connected) == 1)
    await keeper.until(lambda: len(keeper.mesh.connected) == 1)
    return owner.mesh, keeper.mesh


async def measure(named: Mapping[str, Tensor], rounds: int, folder: Path) -> list[Cost]:
    """One cost a round; the first one pays for fresh memory at the keeper."""
    nbytes = sum(tensor.nbytes for tensor in named.values())
    own = {name: copy_into(None, tensor) for name, tensor in named.items()}
    slot: Mapping[str, Tensor] = {}
    costs = []

    def check(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return named[name].dtype, tuple(named[name].shape)

    async with household(folder) as home:
        owner, keeper = await linked(home)
        server = StateServer(owner)
        request = StateRequest(
            owner.self_id,
            JOB,
            SOURCE,
            0,
            1,
            priority=Priority.REPLICA,
            range_bytes=lambda: READ_LIMIT_BYTES,
            reads_in_flight=1,
        )
        for _ in range(rounds):
            began = time.process_time()
            own = {name: copy_into(own[name], tensor) for name, tensor in named.items()}
            copied = time.process_time()
            digests: Mapping[str, Digest] = digests_of(own)
            summed = time.process_time()
            tensors = in_memory(lambda _f, _e, o=own: o)
            server.offer(JOB, SOURCE, tensors, digests=lambda _f, _e, d=digests: d)
            reading = StateReading(keeper, check, slot=slot)
            started, at = time.process_time(), time.perf_counter()
            await reading.read_from(request)
            seconds, passed = time.process_time() - started, time.perf_counter() - at
            slot = reading.state().tensors
            nanoseconds = [1e9 * s / nbytes for s in (copied - began, summed - copied, seconds)]
            costs.append(Cost(*nanoseconds, nbytes / passed / 1e6))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        named = tensors(arguments.megabytes)
        costs = asyncio.run(measure(named, arguments.rounds, Path(folder)))
    print("          copy  checksums  travel   link   total ns/B   MB/s")
    for number, cost in enumerate(costs, 1):
        print(
            f"round {number} {cost.copy:7.2f} {cost.checksums:10.2f} {cost.travel:7.2f} "
            f"{cost.travel - cost.checksums:6.2f} {cost.total:12.2f} {cost.megabytes_per_s:6.0f}"
        )
    best = min(costs, key=lambda cost: cost.total)
    print(f"least total: {best.total:.2f} ns a byte")


if __name__ == "__main__":
    main()
