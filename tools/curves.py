"""Trains every model of the test zoo twice, by p2ptrain and by plain torch, and compares.

    python tools/curves.py                     a covering selection, some minutes
    python tools/curves.py --all               every combination, hours
    python tools/curves.py --models gpt,cnn

Bars: bit-identical (losses, parameters, buffers) where no tied weight lies in two stages; else at
most 1e-5 over the first 10 steps in float32 and 1e-8 over all steps in float64. Dropout's masks are
not plain torch's, so there several devices are compared with one. Prints a Markdown table; exit
code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import structlog
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2ptrain.model.capture import capture
from p2ptrain.training import preparation
from p2ptrain.training.job import SGD, Adam, AdamW
from tests import reference, zoo
from tests.curves import Case, Difference, difference, household_run, plain_torch
from tests.reference import Outcome

STEPS = 30
FIRST_STEPS = 10
FLOAT32_BAR = 1e-5
FLOAT64_BAR = 1e-8

OPTIMIZERS = (
    SGD(lr=0.05, momentum=0.9, weight_decay=1e-4),
    Adam(lr=0.003),
    AdamW(lr=0.003, weight_decay=0.1),
)
DEVICES = (1, 2, 3, 4)
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8)
_NEEDS_TWO = ("mobilenet_v2", "resnet", "regnet")
EXTRAS: tuple[dict[str, float], ...] = (
    {},
    {"decay": 0.9},
    {"clip_grad_norm": 0.5},
    {"decay": 0.9, "clip_grad_norm": 0.5},
)


def every_case(model: str) -> list[Case]:
    """All combinations."""
    return [
        Case(model, devices, micro_batch, steps=STEPS, optimizer=optimizer, **extra)  # type: ignore[arg-type]
        for devices, micro_batch, optimizer, extra in itertools.product(
            DEVICES, MICRO_BATCHES, OPTIMIZERS, EXTRAS
        )
    ]


def covering_cases(model: str, offset: int) -> list[Case]:
    """Four cases; over the models, which differ in `offset`, every pair of settings occurs."""
    return [
        Case(
            model,
            devices,
            MICRO_BATCHES[(offset + 3 * index) % len(MICRO_BATCHES)],
            steps=STEPS,
            optimizer=OPTIMIZERS[(offset + index) % len(OPTIMIZERS)],
            **EXTRAS[(offset // 2 + index) % len(EXTRAS)],  # type: ignore[arg-type]
        )
        for index, devices in enumerate(DEVICES)
    ]


class Bench:
    """One model, made and captured once, set back to its first weights before every run."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._made = zoo.make(name, dtype=dtype)
        self._first = {n: tensor.clone() for n, tensor in self._tensors()}
        example = reference.stack(self._made.data[:2])
        self._captured = capture(self._made.model, self._made.loss, example)

    def household(self, case: Case) -> tuple[Outcome, bool]:
        """p2ptrain's run, and whether a tied weight lay in two stages."""
        self._reset()
        most = min(case.devices, len(self._captured.description.units))
        # Preparing a job would capture the model again, for seconds.
        with patch.object(preparation, "capture", lambda *_, **__: self._captured):
            run = asyncio.run(household_run(replace(case, devices=most), self._made))
        return run.outcome, bool(run.tied)

    def plain(self, case: Case) -> Outcome:
        """Plain torch's run; for dropout p2ptrain's on one device."""
        if case.model == "dropout":
            return self.household(replace(case, devices=1))[0]
        self._reset()
        return plain_torch(case, self._made)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (
            *self._made.model.named_parameters(),
            *self._made.model.named_buffers(),
        ):
            yield name, tensor.detach()

    def _reset(self) -> None:
        for name, tensor in self._tensors():
            tensor.copy_(self._first[name])
        self._made.model.zero_grad()


@dataclass
class Row:
    """What was found for one model.

    Attributes:
        tied: whether a tied weight lay in two stages in any case.
        exact: runs that had to be bit-identical were.
        identical: all runs were, those with a tied weight across stages too.
        first_steps, all_steps: largest loss difference, float32 and float64.
    """

    model: str
    cases: int = 0
    tied: bool = False
    exact: bool = True
    identical: bool = True
    first_steps: float = 0.0
    all_steps: float | None = None

    @property
    def good(self) -> bool:
        """No bar is missed."""
        within = (self.all_steps or 0.0) <= FLOAT64_BAR
        return self.exact and self.first_steps <= FLOAT32_BAR and within

    def line(self) -> str:
        """As a row of the table."""
        double = "-" if self.all_steps is None else f"{self.all_steps:.1e}"
        return (
            f"| {self.model} | {self.cases} | {_yes(self.tied)} | {_yes(self.identical)} | "
            f"{self.first_steps:.1e} | {double} | {'ok' if self.good else 'MISSED'} |"
        )


HEADER = """\
| model | runs | tied across stages | bit-identical | float32, 10 steps | float64, 30 steps | |
|---|---|---|---|---|---|---|"""


def compare(model: str, cases: list[Case]) -> Row:
    """Run every case of one model."""
    row = Row(model)
    benches: dict[torch.dtype, Bench] = {}

    def bench(dtype: torch.dtype) -> Bench:
        return benches.setdefault(dtype, Bench(model, dtype))

    for case in map(_without_single_samples, cases):
        row.cases += 1
        found, tied = _found(bench(case.dtype), case)
        row.first_steps = max(row.first_steps, found.loss)
        same = found == Difference(0.0, 0.0)
        row.identical &= same
        row.exact &= same or tied
        if not same:
            sys.stderr.write(f"{case}: losses differ by {found.loss}, state by {found.state}\n")
        if tied:
            double = replace(case, dtype=torch.float64)
            row.tied = True
            row.all_steps = max(row.all_steps or 0.0, _found(bench(torch.float64), double)[0].loss)
    return row


def _found(bench: Bench, case: Case) -> tuple[Difference, bool]:
    """The difference over the steps that count for the case's type, and whether it was tied."""
    ours, tied = bench.household(case)
    plain = bench.plain(case)
    whole = difference(ours, plain)
    if not tied or case.dtype is torch.float64:
        return whole, tied
    pairs = zip(ours.losses[:FIRST_STEPS], plain.losses[:FIRST_STEPS], strict=True)
    first = max(abs(one - other) for one, other in pairs)
    return Difference(whole.loss and first, whole.state), tied


def _without_single_samples(case: Case) -> Case:
    """BatchNorm refuses a single sample whose channels have one value each, as MobileNet's end."""
    micro_batch = case.micro_batch
    while case.model in _NEEDS_TWO and (micro_batch == 1 or case.batch_size % micro_batch == 1):
        micro_batch += 1
    return replace(case, micro_batch=micro_batch)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main() -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--models", help="comma-separated names of tests/zoo.py (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    names = arguments.models.split(",") if arguments.models else zoo.NAMES
    print(HEADER, flush=True)
    good = True
    for name in names:
        cases = every_case(name) if arguments.all else covering_cases(name, zoo.NAMES.index(name))
        row = compare(name, cases)
        good &= row.good
        print(row.line(), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
