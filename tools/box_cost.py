"""What the box costs in which models of others are measured: memory, start, and the times it finds.

    python tools/box_cost.py [--rounds 9]

Three lines: the idle process's own memory (what it shares with nobody, and what both have more
because of it), milliseconds from a question to the answer of a function that does nothing, and the
seconds of a forward and backward measured in the box by those measured in this process, for three
models, medians of rounds that take turns. Linux, as it is forked here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from p2ptrain.training.allocator import keep_freed_memory  # noqa: E402

keep_freed_memory()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from p2ptrain.node import import_training  # noqa: E402
from p2ptrain.process.box import Box, Question  # noqa: E402
from p2ptrain.process.shared import fork_from_here, forked_box  # noqa: E402
from p2ptrain.process.zygote import Mark  # noqa: E402

Seconds: TypeAlias = dict[int, float]

MEMORY_BYTES = 2 << 30
SIZES = (4, 16)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in MiB."""

    private: float
    proportional: float


def memory(pid: int) -> Memory:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    rows = {
        name: int(rest.split()[0]) / 1024 for name, _, rest in (x.partition(":") for x in lines)
    }
    return Memory(rows["Private_Dirty"] + rows["Private_Clean"], rows["Pss"])


def nothing(content: bytes, mark: Mark) -> bytes:
    """A function that takes no time."""
    return content


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    layers = [part for _ in range(8) for part in (nn.Linear(256, 256), nn.ReLU())]
    convolutions = [
        part
        for _ in range(4)
        for part in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    ]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return {
        "layers": (nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(4, 256)),
        "convolutions": (
            nn.Sequential(nn.Conv2d(3, 32, 1), *convolutions, *pooled),
            torch.randn(4, 3, 32, 32),
        ),
        "attention": (
            nn.Sequential(encoder, nn.Flatten(), nn.Linear(64 * 32, 10)),
            torch.randn(4, 32, 64),
        ),
    }


async def main(rounds: int) -> None:
    before = memory(os.getpid())
    fork_from_here()
    box = forked_box()
    assert box is not None
    await starts(box, rounds)
    pid = box.pid
    assert pid is not None
    own, here = memory(pid), memory(os.getpid())
    more = own.proportional + here.proportional - before.proportional
    print(f"memory: {own.private:.1f} MiB its own, {more:.1f} MiB more in all")
    for name, (model, example) in models().items():
        await ratio(box, name, model, example, rounds)


async def starts(box: Box, rounds: int) -> None:
    taken = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        await box.ask(Question(f"{__name__}:nothing", b"", MEMORY_BYTES, 20.0))
        taken.append(1000 * (time.perf_counter() - begun))
    first, *others = taken
    print(f"start: {first:.0f} ms the first, {statistics.median(others):.0f} ms the next")


async def ratio(box: Box, name: str, model: nn.Module, example: torch.Tensor, rounds: int) -> None:
    from p2ptrain.model.capture import capture
    from p2ptrain.training.compute import ComputeThread
    from p2ptrain.training.profiling import ProfileCache, measure, measure_boxed

    targets = torch.zeros(len(example), dtype=torch.int64)
    description = capture(model, nn.functional.cross_entropy, (example, targets)).description
    content, compute = description.to_bytes(), ComputeThread()
    there: list[Seconds] = []
    here: list[Seconds] = []
    spent: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        there.append(
            _seconds(
                await measure_boxed(
                    *(content, description.digest, SIZES, compute, ProfileCache(None)),
                    *(MEMORY_BYTES, box),
                )
            )
        )
        between = time.perf_counter()
        found = await measure(description, SIZES, compute, ProfileCache(None), MEMORY_BYTES)
        here.append(_seconds(found))
        spent.append((between - begun) / (time.perf_counter() - between))
    sizes = [size for size in SIZES if all(size in found for found in there + here)]
    ratios = ", ".join(
        f"{size}: {_median(there, size) / _median(here, size):.3f}" for size in sizes
    )
    print(
        f"{name}: seconds in the box by those here, by batch size {ratios};"
        f" of the whole measurement {statistics.median(spent):.3f}"
    )
    await compute.close()


def _seconds(measured: Mapping[str, Any]) -> Seconds:
    """Processor seconds by size, all units forward and backward."""
    factor, times = measured["wall_by_cpu"], measured["times"]
    return {int(n): sum([*t["forward"], *t["backward"]]) / factor for n, t in times.items()}


def _median(found: Sequence[Seconds], size: int) -> float:
    return statistics.median(one[size] for one in found)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    import_training()
    asyncio.run(main(chosen.rounds))
