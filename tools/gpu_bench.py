"""One accelerator: a step of plain torch beside ours, a processor beside it, and its copies.

python -m tools.gpu_bench --device cuda           # two minutes at most
python -m tools.gpu_bench --device cpu --small    # that it runs, without one

plain      plain torch with its own settings
exact      plain torch with ours: no TF32, deterministic algorithms
ours       p2ptrain on this device alone, the same batches, one micro-batch each
household  a member beside it that computes on its processor; who has a part is said behind
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter

import torch

import p2ptrain
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.probes import make_accelerator
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import Error
from p2ptrain.events import Event, Plan, Step
from tools.gpu_models import Workload, workloads

SKIPPED_STEPS = 5
"""At the beginning of a run."""

CODE = "24681357"

COPIED_BYTES = 10 << 20

COMPUTING_SECONDS = 0.01
"""Of a product, beside which copies should not be seen."""

IN_A_ROW = 8
"""Products: what one needs is copied while the one before is computed."""


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of a step, of one model; None where there was no time for it."""

    name: str
    plain: float
    exact: float
    ours: float
    household: float | None
    used: str

    def __str__(self) -> str:
        household = "-" if self.household is None else f"{self.household:9.2f}"
        return (
            f"{self.name:12} {self.plain:9.2f} {self.exact:9.2f} {self.ours:9.2f} "
            f"{self.exact / self.ours:10.3f} {household:>9}  {self.used}"
        )


HEADER = (
    f"{'ms a step':12} {'plain':>9} {'exact':>9} {'ours':>9} {'exact/ours':>10} {'household':>9}"
)


def plain_step_seconds(workload: Workload, device: ComputeDevice, steps: int) -> float:
    """Plain torch, the batch copied in each step, and the loss read as a loop that logs it does."""
    model = workload.make().to(device.place)
    optimizer, batches = workload.optimizer(model), workload.batches()
    taken = []
    for number in range(steps):
        before = perf_counter()
        inputs, targets = (part.to(device.place) for part in batches[number % len(batches)])
        loss = workload.loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        taken.append(perf_counter() - before)
    return statistics.median(taken[SKIPPED_STEPS:])


def our_step_seconds(workload: Workload, device: str, steps: int, folder: Path) -> float:
    """`--local --device`."""
    taken: list[float] = []
    options = {"local": True, "device": device, "state_dir": folder, "planner": "single"}
    p2ptrain.train(workload.job(steps), on_event=_collecting(taken), **options)
    return statistics.median(taken[SKIPPED_STEPS:])


def _collecting(taken: list[float], plans: list[Plan] | None = None) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if isinstance(event, Step):
            taken.append(event.seconds)
        elif isinstance(event, Plan) and plans is not None:
            plans.append(event)

    return on_event


async def in_household(
    chosen: Sequence[Workload], device: str, steps: int, folder: Path, until: float
) -> dict[str, tuple[float, str]]:
    """Seconds of a step, and who has a part, of as many as there is time for."""
    found: dict[str, tuple[float, str]] = {}
    network = {"code": CODE, "interfaces": ["127.0.0.1"], "device": device}
    with _member(folder / "helper") as address:
        async with p2ptrain.Node(
            name="bench", role="holder", state_dir=folder / "bench", peers=[address], **network
        ) as node:
            for workload in chosen:
                if monotonic() > until:
                    break
                taken: list[float] = []
                plans: list[Plan] = []
                run = await node.train(workload.job(steps), wait_for=2)
                listen = _collecting(taken, plans)
                async for event in run:
                    listen(event)
                await run.result()
                found[workload.name] = statistics.median(taken[SKIPPED_STEPS:]), _used(plans[-1])
    return found


def _used(plan: Plan) -> str:
    used = {share.name for stage in plan.stages for share in stage.devices}
    left = "; ".join(f"{out.name}: {out.reason}" for out in plan.left_out)
    return f"used: {', '.join(sorted(used))}" + (f" ({left})" if left else "")


@contextmanager
def _member(folder: Path) -> Iterator[str]:
    """A `join` on this machine's processor; its address."""
    options = ["--name", "helper", "--code", CODE, "--state-dir", str(folder), "--device", "cpu"]
    started = subprocess.Popen(
        [sys.executable, "-m", "p2ptrain", "join", *options, "--interface", "127.0.0.1", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        ready = next(e for e in map(json.loads, started.stdout) if e["event"] == "ready")
        yield f"127.0.0.1:{ready['port']}"
    finally:
        started.terminate()
        started.wait()


def copies(device: ComputeDevice) -> list[str]:
    """How fast they are, and how much of them is seen beside a product."""
    source = device.host_buffer(COPIED_BYTES, torch.uint8)
    slot = device.host_buffer(COPIED_BYTES, torch.uint8)
    inside = device.copy_in(torch.zeros(COPIED_BYTES, dtype=torch.uint8))
    factor, product = _product(device)

    def copied() -> None:
        device.copy_in(source)
        device.copy_out([inside], [slot])

    incoming = _seconds(device, lambda: device.copy_in(source))
    outgoing = _seconds(device, lambda: device.copy_out([inside], [slot]))
    alone = _seconds(device, product, IN_A_ROW)
    both = _seconds(device, lambda: (copied(), product()), IN_A_ROW)
    seen = max(0.0, both - alone) / (incoming + outgoing)
    size = COPIED_BYTES >> 20
    return [
        f"copies of {size} MiB: in {COPIED_BYTES / incoming / 1e9:.1f} GB/s, "
        f"out {COPIED_BYTES / outgoing / 1e9:.1f} GB/s",
        f"beside a product of {factor} numbers a side ({alone * 1e3:.1f} ms): "
        f"{both * 1e3:.1f} ms with both copies, {1 - min(seen, 1.0):.0%} of them hidden",
    ]


def _product(device: ComputeDevice) -> tuple[int, Callable[[], object]]:
    """One that takes about COMPUTING_SECONDS."""
    side = 256
    while side < 1 << 14 and _seconds(device, _square(device, side)) < COMPUTING_SECONDS / 2:
        side *= 2
    return side, _square(device, side)


def _square(device: ComputeDevice, side: int) -> Callable[[], object]:
    matrix = device.copy_in(torch.randn(side, side))
    return lambda: matrix @ matrix


def _seconds(device: ComputeDevice, run: Callable[[], object], times: int = 1) -> float:
    """Of one run: the median of some tries, each of so many in a row."""
    taken = []
    for _ in range(8):
        device.wait()
        before = perf_counter()
        for _ in range(times):
            run()
        device.wait()
        taken.append((perf_counter() - before) / times)
    return statistics.median(taken[2:])


def measure(device: str, *, small: bool, steps: int, seconds: float, household: bool) -> None:
    """Print everything."""
    until = monotonic() + seconds
    device = f"{device}:0" if device in ("cuda", "xpu") else device
    computes = HOST if device == "cpu" else make_accelerator(device)
    print(f"{computes.title} ({computes.kind}), torch {torch.__version__}")
    chosen = workloads(small=small)
    plain = [plain_step_seconds(workload, computes, steps) for workload in chosen]
    computes.prepare_thread()
    exact = [plain_step_seconds(workload, computes, steps) for workload in chosen]
    for line in copies(computes):
        print(line)
    computes.release_cached()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ours = [our_step_seconds(w, device, steps, Path(folder) / "alone") for w in chosen]
        others: dict[str, tuple[float, str]] = {}
        if household:
            running = in_household(chosen, device, steps, Path(folder), until - 0.4 * seconds)
            others = asyncio.run(running)
    print(HEADER)
    for workload, *taken in zip(chosen, plain, exact, ours, strict=True):
        beside = others.get(workload.name)
        used = "no time left" if beside is None and household else (beside or (0, ""))[1]
        beside_ms = None if beside is None else 1e3 * beside[0]
        print(Row(workload.name, *(1e3 * one for one in taken), beside_ms, used))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="as of p2ptrain train")
    parser.add_argument("--small", action="store_true", help="models for a processor")
    parser.add_argument("--steps", type=int, default=25, help="of each run")
    parser.add_argument("--seconds", type=float, default=110.0, help="for everything")
    parser.add_argument("--alone", action="store_true", help="without a member beside it")
    asked = parser.parse_args()
    try:
        measure(
            asked.device,
            small=asked.small,
            steps=max(asked.steps, SKIPPED_STEPS + 1),
            seconds=asked.seconds,
            household=not asked.alone,
        )
    except Error as error:
        sys.exit(f"gpu_bench: {error}")


if __name__ == "__main__":
    main()
