"""One accelerator: what it computes wrong, its copies, our step beside plain torch's, and a member.

python -m tools.gpu_bench --device cuda           # two minutes at most
python -m tools.gpu_bench --device cpu --small    # that it runs, without one

Each figure is printed when it is there:

plain      plain torch with its own settings
exact      plain torch with ours: no TF32, deterministic algorithms
ours       p2ptrain on this device alone, the same batches, one micro-batch each
beside     a member that computes on its processor; who has a part is said behind
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter

import torch

import p2ptrain
from p2ptrain.devices.check import check_device
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


HEADER = f"{'ms a step':12} {'plain':>9} {'exact':>9} {'ours':>9} {'exact/ours':>10}"


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
) -> AsyncIterator[tuple[Workload, float, str]]:
    """Seconds of a step, and who has a part, of as many as there is time for."""
    network = {"code": CODE, "interfaces": ["127.0.0.1"], "device": device}
    with _member(folder / "helper") as address:
        async with p2ptrain.Node(
            name="bench", role="holder", state_dir=folder / "bench", peers=[address], **network
        ) as node:
            for workload in chosen:
                if monotonic() > until:
                    return
                taken: list[float] = []
                plans: list[Plan] = []
                run = await node.train(workload.job(steps), wait_for=2)
                listen = _collecting(taken, plans)
                async for event in run:
                    listen(event)
                await run.result()
                yield workload, statistics.median(taken[SKIPPED_STEPS:]), _used(plans[-1])


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


def checked(device: ComputeDevice) -> Iterator[str]:
    """Each kind of computation: the largest difference from the processor's, or what is wrong."""
    report = check_device(device)
    for kind, found in {**report.largest, **report.failures}.items():
        again = ", other bits now and then" if kind in report.unrepeatable else ""
        yield f"{kind:28} {found if isinstance(found, str) else f'{found:.1e}'}{again}"
    yield f"{report.speedup:.1f} times as fast as the processor"


def measure(
    device: ComputeDevice,
    chosen: Sequence[Workload],
    steps: int,
    ours: Callable[[Workload], float],
    show: Callable[[str], None],
) -> list[float]:
    """Of the device alone; the seconds of our steps."""
    show(f"{device.title} ({device.kind}), torch {torch.__version__}")
    plain = [plain_step_seconds(workload, device, steps) for workload in chosen]
    for line in () if device.is_host else checked(device):
        show(line)
    device.prepare_thread()
    for line in copies(device):
        show(line)
    show(HEADER)
    found = []
    for workload, plain_seconds in zip(chosen, plain, strict=True):
        exact_seconds = plain_step_seconds(workload, device, steps)
        device.release_cached()
        found.append(ours(workload))
        times = " ".join(f"{1e3 * one:9.2f}" for one in (plain_seconds, exact_seconds, found[-1]))
        show(f"{workload.name:12} {times} {exact_seconds / found[-1]:10.3f}")
    return found


async def measure_beside(
    chosen: Sequence[Workload],
    alone: Sequence[float],
    members: AsyncIterator[tuple[Workload, float, str]],
    show: Callable[[str], None],
) -> None:
    """A member beside it."""
    left = dict(zip([workload.name for workload in chosen], alone, strict=True))
    async for workload, seconds, used in members:
        gain = left.pop(workload.name) / seconds
        show(f"{workload.name:12} {1e3 * seconds:9.2f} beside, {gain:.2f} times as fast: {used}")
    for name in left:
        show(f"{name:12} no time left")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="as of p2ptrain train")
    parser.add_argument("--small", action="store_true", help="models for a processor")
    parser.add_argument("--steps", type=int, default=25, help="of each run")
    parser.add_argument("--seconds", type=float, default=110.0, help="for everything")
    asked = parser.parse_args()
    until, steps = monotonic() + asked.seconds, max(asked.steps, SKIPPED_STEPS + 1)
    name = f"{asked.device}:0" if asked.device in ("cuda", "xpu") else asked.device
    chosen = workloads(small=asked.small)
    show = partial(print, flush=True)
    try:
        device = HOST if name == HOST.name else make_accelerator(name)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
            folder = Path(made)
            ours = partial(our_step_seconds, device=name, steps=steps, folder=folder / "alone")
            alone = measure(device, chosen, steps, ours, show)
            members = in_household(chosen, name, steps, folder, until - 0.4 * asked.seconds)
            asyncio.run(measure_beside(chosen, alone, members, show))
    except Error as error:
        sys.exit(f"gpu_bench: {error}")


if __name__ == "__main__":
    main()
