"""How close training with groups of devices stays to plain torch, beside how close it can be.

    python tools/group_curves.py                    some minutes
    python tools/group_curves.py --models mlp,cnn --plans 4 --steps 50

A group adds gradients in another order than one device, which changes the last bit of some. For
every model of the test zoo and some random plans (stages that divide samples, deal whole
micro-batches, or are single devices; seeded) it prints the largest difference of any step's loss:

- float64: p2ptrain and plain torch; the bar is 1e-8 where only whole micro-batches are dealt, or
  where dividing by samples changes nothing (no BatchNorm, no dropout).
- float32: the same; and beside it what plain torch differs from itself when, before its first
  update, every gradient is moved by one unit in the last place. No bar: the second number says what
  the model makes of a last bit.

Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import structlog
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2ptrain.model.capture import capture
from p2ptrain.model.division import division_effects
from p2ptrain.plan.allocation import Allocation
from p2ptrain.training import household_plan
from p2ptrain.training.options import TrainOptions
from tests import reference, zoo
from tests.curves import Case, difference, job_of, outcome_of, plain_torch
from tests.integration.training.group_plans import Stage, device_count, plan
from tests.integration.training.household import devices
from tests.reference import Outcome

MICRO_BATCH, MICRO_BATCHES = 4, 4
FLOAT64_BAR = 1e-8
HEADER = """\
| model | plan | float64 | float32 | float32, one ulp in plain torch | |
|---|---|---|---|---|---|"""


def random_plan(rng: random.Random, *, divide: bool) -> list[Stage]:
    """One to three stages, at least one of them a group."""
    while True:
        stages = [_random_stage(rng, divide=divide) for _ in range(rng.randint(1, 3))]
        if any(len(stage.shares) > 1 for stage in stages):
            return stages


def _random_stage(rng: random.Random, *, divide: bool) -> Stage:
    is_divided = divide and rng.random() < 0.5
    whole = MICRO_BATCH if is_divided else MICRO_BATCHES
    cuts = sorted(rng.sample(range(1, whole), rng.randint(0, 2)))
    shares = tuple(b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True))
    return Stage(shares, Allocation.SAMPLES if is_divided else Allocation.MICRO_BATCHES)


class Bench:
    """One model in one type, with the same first weights for every run."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.case = Case(name, devices=1, micro_batch=MICRO_BATCH, dtype=dtype)
        made = zoo.make(name, dtype=dtype)
        captured = capture(made.model, made.loss, reference.stack(made.data[:2]))
        self.effects = division_effects(captured.description)

    def household(self, stages: Sequence[Stage], steps: int) -> Outcome:
        """p2ptrain's run."""
        return asyncio.run(self._run(stages, replace(self.case, steps=steps)))

    async def _run(self, stages: Sequence[Stage], case: Case) -> Outcome:
        made, count = zoo.make(case.model, dtype=case.dtype), device_count(stages)
        with patch.object(household_plan, "make_plan", partial(plan, stages)):
            async with devices(count) as household:
                options = TrainOptions(wait_for=count, steps=case.steps)
                await household.holder_run(job_of(case, made), options).run()
        return outcome_of(household.losses, made)


def one_ulp(step: int, model: torch.nn.Module) -> None:
    """Move every gradient of the first update by one unit in the last place."""
    if step == 0:
        for parameter in model.parameters():
            if parameter.grad is not None:
                away = torch.full_like(parameter.grad, float("inf"))
                parameter.grad = torch.nextafter(parameter.grad, away)


def compare(name: str, plans: int, steps: int) -> bool:
    """Print a model's rows; whether all bars are kept."""
    double, single = Bench(name, torch.float64), Bench(name, torch.float32)
    exact = plain_torch(replace(double.case, steps=steps))
    plain = plain_torch(replace(single.case, steps=steps))
    nudged = plain_torch(replace(single.case, steps=steps), before_update=one_ulp)
    ulp = difference(nudged, plain).loss
    rng, good = random.Random(name), True
    for number in range(plans):
        stages = random_plan(rng, divide=number % 2 == 1)
        found = difference(double.household(stages, steps), exact).loss
        rounded = difference(single.household(stages, steps), plain).loss
        barred = not double.effects or not any(
            len(s.shares) > 1 and s.allocation is Allocation.SAMPLES for s in stages
        )
        kept = found <= FLOAT64_BAR or not barred
        good &= kept
        verdict = "ok" if found <= FLOAT64_BAR else "documented" if kept else "MISSED"
        told = " ".join(map(_named, stages))
        print(f"| {name} | {told} | {found:.1e} | {rounded:.1e} | {ulp:.1e} | {verdict} |")
    return good


def _named(stage: Stage) -> str:
    shares = ":".join(map(str, stage.shares))
    return shares if len(stage.shares) == 1 else f"{stage.allocation.value} {shares};"


def main() -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="comma-separated names of tests/zoo.py (default: all)")
    parser.add_argument("--plans", type=int, default=4, help="random plans a model")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    names = arguments.models.split(",") if arguments.models else zoo.NAMES
    print(HEADER)
    kept = [compare(name, arguments.plans, arguments.steps) for name in names]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
