"""Predicted against real seconds of a model's forward and backward. Needs root, Linux.

    python tools/profile_accuracy.py [--models NAME,NAME] [--shares 0.3,0.3] [--sizes 4,16,64,128]

Every device of an emulated household profiles the model as it does before a plan is made, all at
the same time, and then trains it as one stage: forwards and backwards of micro-batches of each size
in the compute thread, gradients accumulated, and an update of the weights after each size.

One line a size, medians over the devices, in milliseconds a sample: what the profile predicts (in
brackets where some device has not measured that size), what training takes, and their ratio; then
the same in processor time, with the least and the largest ratio of a device. The profile's
processor time is its wall time by the factor that it was scaled with. Wall time depends on what
else the machine does; processor time less, but it does too: caches and halves of cores are shared.
Below: the seconds that profiling took, its sizes, and an update's, which no profile predicts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.bench import models  # noqa: E402
from tools.bench.cells import BATCH_SIZES, MODELS  # noqa: E402
from tools.bench.processes import Company  # noqa: E402
from tools.bench.worker.channel import Channel  # noqa: E402
from tools.testbed import Testbed  # noqa: E402

LIMIT_SECONDS = 280.0
WARM_PIECES, LEAST_PIECES = 1, 2
MEMORY_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class Task:
    """What one device does.

    Attributes:
        batch_size: of the job, which decides what is profiled.
        devices: how many the household has.
        sizes: of micro-batches to train with.
        seconds: processor time to train with each size, at least.
        largest_second: whether the largest size is profiled after the smallest.
    """

    model: str
    batch_size: int
    devices: int
    sizes: Sequence[int]
    seconds: float
    largest_second: bool = False


@dataclass(slots=True)
class Spent:
    """Seconds of some work."""

    wall: float = 0.0
    cpu: float = 0.0


# -- inside a device -----------------------------------------------------------------------------


def inside(task: Task) -> None:
    """Profile, wait for the others, train."""
    from p2ptrain.training.allocator import keep_freed_memory

    keep_freed_memory()
    channel = Channel()
    import torch

    torch.set_num_threads(1)
    asyncio.run(_measure(task, channel))


async def _measure(task: Task, channel: Channel) -> None:
    from p2ptrain.cli.script import load_job
    from p2ptrain.training.compute import ComputeThread
    from p2ptrain.training.options import TrainOptions
    from p2ptrain.training.preparation import prepare
    from p2ptrain.training.profiling import ProfileCache, batch_sizes_to_measure, measure

    job = load_job(str(models.script(task.model)), [("batch_size", str(task.batch_size))])
    prepared = prepare(job, TrainOptions(local=True))
    compute = ComputeThread()
    channel.ready()
    sizes = batch_sizes_to_measure(task.batch_size, 0, task.devices, prepared.least_piece)
    description = prepared.captured.description
    begin = await compute.run((0,), lambda: (time.perf_counter(), time.thread_time()))
    measured = await measure(
        *(description, sizes, compute, ProfileCache(None), MEMORY_BYTES),
        largest_second=task.largest_second,
    )
    end = await compute.run((0,), lambda: (time.perf_counter(), time.thread_time()))
    channel.say("profiled", measured=measured, wall=end[0] - begin[0], cpu=end[1] - begin[1])
    channel.wait()
    training = await compute.run((0,), partial(Training, prepared))
    for size in task.sizes:
        wall, cpu = await training.piece(compute, size, task.seconds)
        channel.say("trained", size=size, wall=wall, cpu=cpu, update=training.update_seconds)
    channel.say("done")
    channel.wait()


class Training:
    """The whole model as one stage.

    Attributes:
        update_seconds: processor time of the last update.
    """

    def __init__(self, prepared: Any) -> None:
        from p2ptrain.model.optimizer import StageOptimizer
        from p2ptrain.model.stage import Stage

        self._prepared = prepared
        description = prepared.captured.description
        self._stage = Stage(description, 0, len(description.units), prepared.captured.state())
        self._optimizer = StageOptimizer(prepared.job.optimizer, self._stage.parameters())
        self.update_seconds = 0.0

    async def piece(self, compute: Any, size: int, seconds: float) -> tuple[float, float]:
        """Wall and processor seconds of a micro-batch's forward and backward."""
        captured = self._prepared.captured
        inputs, targets = self._prepared.samples.collate(range(size), "a micro-batch")
        batch = captured.flatten_input(inputs), captured.flatten_target(targets)
        spent, pieces = Spent(), -WARM_PIECES
        while pieces < LEAST_PIECES or spent.cpu < seconds:
            if pieces == 0:
                spent = Spent()
            forward = partial(self._stage.forward, 0, *batch, weight=1.0)
            await compute.run((1, 0), partial(_timed, forward, spent))
            await compute.run((0, 0), partial(_timed, partial(self._stage.backward, 0), spent))
            pieces += 1
        update = Spent()
        await compute.run((0, 0), partial(_timed, self._optimizer.step, update))
        self._optimizer.zero_grad()
        self.update_seconds = update.cpu
        return spent.wall / pieces, spent.cpu / pieces


def _timed(run: Any, spent: Spent) -> None:
    wall, cpu = time.perf_counter(), time.thread_time()
    run()
    spent.cpu += time.thread_time() - cpu
    spent.wall += time.perf_counter() - wall


# -- outside -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Of one device.

    Attributes:
        measured: its profile.
        wall, cpu: seconds that profiling took.
        trained: by size of the micro-batch, what it said of it.
    """

    measured: Mapping[str, Any]
    wall: float
    cpu: float
    trained: Mapping[int, Mapping[str, float]]


def measure(task: Task, testbed: Testbed) -> list[DeviceFigures]:
    """All devices at the same time. Raises CellError."""
    company = Company(LIMIT_SECONDS)
    orders = []
    for number, device in enumerate(testbed.devices):
        own = replace(task, largest_second=number % 2 == 0)  # as a coordinator asks them
        command = ("tools/profile_accuracy.py", "--inside", json.dumps(asdict(own)))
        orders.append((device, command))
    workers = company.start_lifted(orders)
    for worker in workers:
        worker.tell(go=True)
    profiled = company.expect_each(workers, "profiled")
    for worker in workers:
        worker.tell(go=True)
    company.expect_each(workers, "done")
    for worker in workers:
        worker.tell(stop=True)
    return [
        DeviceFigures(
            said["measured"],
            said["wall"],
            said["cpu"],
            {e["size"]: e for e in worker.said if e["event"] == "trained"},
        )
        for said, worker in zip(profiled, workers, strict=True)
    ]


def report(task: Task, figures: Sequence[DeviceFigures]) -> str:
    """The table of one model."""
    from p2ptrain.plan.times import TimeTable, bytes_by_flop
    from p2ptrain.training.alike import Measured, shared

    found = shared(
        {
            str(number): Measured(
                one.measured["processor"],
                one.measured["wall_by_cpu"],
                TimeTable.from_json(one.measured["times"], "times"),
                None,
                frozenset(one.measured["cold"]),
            )
            for number, one in enumerate(figures)
        }
    )
    tables = [found[str(number)].times for number in range(len(figures))]
    reference = max(tables, key=lambda table: table.sizes[-1])
    units = figures[0].measured["units"]
    weights = bytes_by_flop((unit["parameter_bytes"], unit["flops"]) for unit in units)
    tables = [t.extended_like(reference).completed(task.batch_size, weights) for t in tables]
    factors = [one.measured.get("wall_by_cpu", one.wall / one.cpu) for one in figures]
    lines = []
    for size in task.sizes:
        walls, cpus, ratios, cpu_ratios, real_walls, real_cpus = [], [], [], [], [], []
        for one, table, factor in zip(figures, tables, factors, strict=True):
            times, real = table.at(size), one.trained[size]
            wall = sum(times.forward) + sum(times.backward)
            walls.append(wall)
            cpus.append(wall / factor)
            real_walls.append(real["wall"])
            real_cpus.append(real["cpu"])
            ratios.append(wall / real["wall"])
            cpu_ratios.append(wall / factor / real["cpu"])
        a_sample = [1e3 / size * statistics.median(c) for c in (walls, real_walls, cpus, real_cpus)]
        inferred = not all(str(size) in one.measured["times"] for one in figures)
        shown = f"({a_sample[0]:.2f})" if inferred else f"{a_sample[0]:.2f} "
        lines.append(
            f"{task.model:<16}{size:>5}{shown:>10}{a_sample[1]:>9.2f}"
            f"{statistics.median(ratios):>7.2f}{a_sample[2]:>10.3f}{a_sample[3]:>9.3f}"
            f"{statistics.median(cpu_ratios):>7.2f}   {min(cpu_ratios):.2f} - {max(cpu_ratios):.2f}"
        )
    seconds = sorted(one.wall for one in figures)
    sizes = sorted({",".join(one.measured["times"]) for one in figures})
    updates = [1e3 * one.trained[task.sizes[-1]]["update"] for one in figures]
    lines.append(
        f"  profiled in {seconds[0]:.1f} - {seconds[-1]:.1f} s, sizes {'; '.join(sizes)}; "
        f"wall by processor time {min(factors):.2f} - {max(factors):.2f}; "
        f"update {statistics.median(updates):.1f} ms"
    )
    return "\n".join(lines)


HEADER = (
    f"{'model':<16}{'size':>5}{'predicted':>10}{'trained':>9}{'ratio':>7}"
    f"{'predicted':>10}{'trained':>9}{'ratio':>7}   least - most\n"
    f"{'':<16}{'':>5}{'wall ms':>10}{'wall ms':>9}{'':>7}{'CPU ms':>10}{'CPU ms':>9}"
)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--shares", default="0.3", help="of a core, one a device, with commas")
    parser.add_argument("--sizes", type=_numbers, default="4,16,64,128,256")
    parser.add_argument("--size", choices=("S", "L"), default="S", help="of the mini-batch")
    parser.add_argument("--seconds", type=float, default=0.5, help="processor time for each size")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(Task(**json.loads(arguments.inside)))
        return
    shares = [float(share) for share in arguments.shares.split(",")]
    kept = {}
    print(HEADER)
    for name in arguments.models.split(","):
        batch_size = BATCH_SIZES[name][arguments.size]
        sizes = [size for size in arguments.sizes if size <= batch_size]
        task = Task(name, batch_size, len(shares), sizes, arguments.seconds)
        with Testbed.of_shares(shares) as testbed:
            figures = measure(task, testbed)
        kept[name] = [asdict(one) for one in figures]
        print(report(task, figures), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
