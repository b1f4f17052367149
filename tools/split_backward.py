"""What a backward in two parts costs beside a whole one: time and memory.

    python tools/split_backward.py --models mobilenetv2-16,vit-8 --seconds 10

The stage is the whole model but its first unit, so that there are gradients to send back. Ways take
turns, so that both see the same machine; times are medians of this thread's CPU time. Memory is
what is allocated beyond the weights and their gradients: at most during the backward, and between
its two parts. Both ways' gradients are compared bit for bit. Synthetic data, random weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from p2ptrain.model.capture import capture  # noqa: E402
from p2ptrain.model.stage import Stage  # noqa: E402
from tools import paper_models  # noqa: E402
from tools.paper_models import Logits  # noqa: E402

MIB = 2**20
LABELS = 10


@dataclass(frozen=True, slots=True)
class Case:
    """A model with the batch that is measured."""

    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    words: int = 0

    def sample(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size = (self.batch, *self.shape)
        if self.words:
            inputs = torch.randint(self.words, size, generator=generator)
        else:
            inputs = torch.randn(size, generator=generator)
        return inputs, torch.randint(LABELS, (self.batch,), generator=generator)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        hidden_dropout_prob=0.0,
        num_labels=LABELS,
    )
    return Logits(ViTForImageClassification(config))


def _paper(name: str) -> Callable[[], nn.Module]:
    return lambda: paper_models.MODELS[name].build(LABELS)


CASES = {
    "mobilenetv2-16": Case(_paper("mobilenetv2"), 16, (3, 32, 32)),
    "mobilenetv2-64": Case(_paper("mobilenetv2"), 64, (3, 32, 32)),
    "resnet50-8": Case(_paper("resnet50"), 8, (3, 64, 64)),
    "bert-small-8": Case(_paper("bert-small"), 8, (64,), words=30522),
    "vit-8": Case(_vit, 8, (3, 64, 64)),
}


class Subject:
    """A stage with a micro-batch for it."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        inputs, self._targets = case.sample()
        model = capture(case.build(), nn.functional.cross_entropy, (inputs, self._targets))
        units = len(model.description.units)
        first = Stage(model.description, 0, 1, model.state())
        self._inputs = first.forward(0, [inputs], [self._targets])
        self.stage = Stage(model.description, 1, units, model.state())

    def forward(self, *, split: bool) -> None:
        self.stage.forward(0, self._inputs, [self._targets], split=split)

    def gradients(self) -> dict[str, Tensor]:
        """Takes the parameters' gradients away."""
        found = {}
        for name, parameter in self.stage.parameters().items():
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        return found


@dataclass(slots=True)
class Times:
    """CPU seconds of each pass."""

    plain_forward: list[float]
    watched_forward: list[float]
    whole: list[float]
    inputs: list[float]
    weights: list[float]


def measure_times(subject: Subject, seconds: float) -> Times:
    """Both ways in turn, for so long."""
    times = Times([], [], [], [], [])
    stage = subject.stage
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times.whole) < 3:
        _timed(times.plain_forward, lambda: subject.forward(split=False))
        _timed(times.whole, lambda: stage.backward(0))
        _timed(times.watched_forward, lambda: subject.forward(split=True))
        _timed(times.inputs, lambda: stage.backward_inputs(0))
        _timed(times.weights, lambda: stage.backward_weights(0))
    return times


def _timed(times: list[float], run: Callable[[], object]) -> None:
    started = time.thread_time()
    run()
    times.append(time.thread_time() - started)


def same_bits(subject: Subject) -> bool:
    """Whether both ways give the same gradients, of the inputs and of the weights."""
    subject.gradients()
    subject.forward(split=False)
    whole = subject.stage.backward(0), subject.gradients()
    subject.forward(split=True)
    inputs = subject.stage.backward_inputs(0)
    subject.stage.backward_weights(0)
    split = inputs, subject.gradients()
    pairs = zip(whole[0], split[0], strict=True)
    return whole[1].keys() == split[1].keys() and all(
        [a is b or torch.equal(a, b) for a, b in pairs]  # type: ignore[arg-type]
        + [torch.equal(whole[1][name], split[1][name]) for name in whole[1]]
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes beyond the weights and their gradients: at most in the backward, kept in between."""

    whole_peak: int
    split_peak: int
    forward: int
    between: int


def measure_memory(subject: Subject) -> Memory:
    """One pass each; gradients stay allocated, so that only passing memory counts."""
    forward, peak = _allocated(
        lambda: subject.forward(split=False), lambda: subject.stage.backward(0)
    )
    _, inputs_peak = _allocated(
        lambda: subject.forward(split=True), lambda: subject.stage.backward_inputs(0)
    )
    subject.stage.backward_weights(0)
    between, weights_peak = _allocated(
        lambda: (subject.forward(split=True), subject.stage.backward_inputs(0)),
        lambda: subject.stage.backward_weights(0),
    )
    return Memory(peak, max(inputs_peak, weights_peak), forward, between)


def _allocated(before: Callable[[], object], run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `before` leaves allocated, and the most that is while `run` runs."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as first:
        before()
    kept = sum(_allocations(first))
    with profile(activities=activities, profile_memory=True) as second:
        run()
    now = peak = kept
    for nbytes in _allocations(second):
        now += nbytes
        peak = max(peak, now)
    return kept, peak


def _allocations(profiled: profile) -> list[int]:
    """Bytes allocated (freed: negative), in order of time."""
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    records = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return [nbytes for _, nbytes in sorted(records)]


HEADER = (
    f"{'model':<16}{'whole':>9}{'inputs':>9}{'weights':>9}{'cost':>8}{'forward':>9}"
    f"{'peak':>8}{'split':>8}{'between':>9}{'forward':>9}  same bits"
)


def line(name: str, subject: Subject, seconds: float) -> str:
    """One row: milliseconds, percent more than whole, MiB."""
    subject.forward(split=True)
    subject.stage.backward(0)
    same = same_bits(subject)
    times = measure_times(subject, seconds)
    plain, watched, whole, inputs, weights = (
        statistics.median(each) * 1e3
        for each in (
            times.plain_forward,
            times.watched_forward,
            times.whole,
            times.inputs,
            times.weights,
        )
    )
    memory = measure_memory(subject)
    return (
        f"{name:<16}{whole:>9.2f}{inputs:>9.2f}{weights:>9.2f}"
        f"{(inputs + weights) / whole - 1:>+8.1%}{watched / plain - 1:>+9.1%}"
        f"{memory.whole_peak / MIB:>8.1f}{memory.split_peak / MIB:>8.1f}"
        f"{memory.between / MIB:>9.1f}{memory.forward / MIB:>9.1f}  {'yes' if same else 'NO'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--models", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each model's times")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("times in ms (forward: cost of watching it); memory in MiB (forward: kept after it)")
    print(HEADER)
    for name in arguments.models.split(","):
        print(line(name, Subject(CASES[name]), arguments.seconds), flush=True)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()
