"""What the C library's allocator costs training: as it comes, and told to keep freed memory.

    python tools/allocator.py --models mobilenetv2-16,vit-8 --seconds 3 --repeat 2

The whole model is one stage, computed in a thread of its own as in a job: rounds of 1F1B with a
few micro-batches under way, and an update. Each way runs in a process of its own, in turn. Shown
are this thread's CPU time and page faults by micro-batch (medians over rounds), and the most
anonymous memory after any forward, above what the process takes before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import p2ptrain  # noqa: E402
from p2ptrain.model.capture import capture  # noqa: E402
from p2ptrain.model.optimizer import StageOptimizer  # noqa: E402
from p2ptrain.model.stage import Stage  # noqa: E402
from p2ptrain.plan.schedule import one_f_one_b  # noqa: E402
from p2ptrain.training.allocator import keep_freed_memory  # noqa: E402
from tools.bench import models  # noqa: E402

MIB = 1 << 20
CASES = ("mobilenetv2-16", "mobilenetv2-64", "resnet50-8", "bert_small-8", "vit-8")
WAYS = ("as it comes", "kept")
WARM_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one process: seconds and faults by micro-batch, bytes."""

    cpu_seconds: float
    faults: float
    peak_bytes: int


class Subject:
    """A model as one stage, with a micro-batch for it."""

    def __init__(self, case: str) -> None:
        name, size = case.rsplit("-", 1)
        training = models.load(name)
        module = training.build()
        self._inputs, self._targets = training.data(int(size)).tensors
        example = (self._inputs[:2], self._targets[:2])
        captured = capture(module, training.loss, example, evaluation=False)
        self._description, self._state = captured.description, captured.state()

    def train(self, seconds: float, depth: int) -> Figures:
        """Rounds of 2 · depth micro-batches, at most `depth` of them under way."""
        before = peak = _anonymous_bytes()
        stage = Stage(self._description, 0, len(self._description.units), self._state)
        optimizer = StageOptimizer(p2ptrain.SGD(lr=0.01, momentum=0.9), stage.parameters())
        spent: list[float] = []
        faults: list[int] = []
        until = time.monotonic() + seconds
        while len(spent) <= WARM_ROUNDS or time.monotonic() < until:
            cpu, faulted = time.thread_time(), _faults()
            for action in one_f_one_b(2 * depth, depth):
                if action.kind == "forward":
                    inputs, targets = [self._inputs], [self._targets]
                    stage.forward(action.micro_batch, inputs, targets, weight=1 / (2 * depth))
                    peak = max(peak, _anonymous_bytes())
                else:
                    stage.backward(action.micro_batch)
            optimizer.step(1.0)
            optimizer.zero_grad()
            spent.append(time.thread_time() - cpu)
            faults.append(_faults() - faulted)
        return Figures(
            statistics.median(spent[WARM_ROUNDS:]) / (2 * depth),
            statistics.median(faults[WARM_ROUNDS:]) / (2 * depth),
            peak - before,
        )


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _anonymous_bytes() -> int:
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith("RssAnon:"):
            return int(row.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def measure(subject: Subject, way: str, seconds: float, depth: int) -> Figures:
    """In a new process."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(subject, way, seconds, depth, theirs))
    process.start()
    theirs.close()
    figures: Figures = mine.recv()
    process.join()
    return figures


def _run(subject: Subject, way: str, seconds: float, depth: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    if way == "kept" and not keep_freed_memory():
        raise SystemExit("this C library's allocator cannot be told to keep memory")
    thread = threading.Thread(target=lambda: answer.send(subject.train(seconds, depth)))
    thread.start()
    thread.join()


def rows(case: str, found: Mapping[str, list[Figures]]) -> str:
    """One line a way, medians over the processes."""
    lines = []
    for way, figures in found.items():
        cpu = statistics.median(one.cpu_seconds for one in figures) * 1e3
        faults = statistics.median(one.faults for one in figures)
        peak = statistics.median(one.peak_bytes for one in figures) / MIB
        lines.append(f"{case:<16}{way:<13}{cpu:>10.1f}{faults:>9.0f}{peak:>10.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(CASES), help="NAME-SAMPLES, with commas")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each process")
    parser.add_argument("--repeat", type=int, default=2, help="processes for each way")
    parser.add_argument("--depth", type=int, default=2, help="micro-batches under way")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':<16}{'freed memory':<13}{'CPU ms':>10}{'faults':>9}{'peak MiB':>10}")
    for case in arguments.models.split(","):
        subject = Subject(case)
        found: dict[str, list[Figures]] = {way: [] for way in WAYS}
        for _ in range(arguments.repeat):
            for way in WAYS:
                found[way].append(measure(subject, way, arguments.seconds, arguments.depth))
        print(rows(case, found), flush=True)


if __name__ == "__main__":
    main()
