"""What must not show in a job in which somebody died: held against one in which nothing did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from p2ptrain.events import Failure, Plan, Step
from tests.support.faults import BATCH, STEPS, Fault, Outcome

LOSS_TOLERANCE = 1e-8
"""Of float64, where a group adds in another order than the devices that take over."""


def problems(found: Outcome, wanted: Outcome, fault: Fault) -> list[str]:
    """Everything in which a run shows what went wrong in it."""
    checks: Sequence[Callable[[Outcome, Outcome], list[str]]] = (
        _steps,
        _exact_curve if fault.is_exact else _near_curve,
        _samples,
        _people,
    )
    return [*(one for check in checks for one in check(found, wanted)), *found.left_over]


def _steps(found: Outcome, wanted: Outcome) -> list[str]:
    steps = [event.step for event in found.events if isinstance(event, Step)]
    if steps != list(range(1, STEPS + 1)):
        return [f"steps {steps}"]
    evaluated = [step for step, _ in found.evaluations]
    expected = [step for step, _ in wanted.evaluations]
    return [] if evaluated == expected else [f"evaluations {evaluated} instead of {expected}"]


def _exact_curve(found: Outcome, wanted: Outcome) -> list[str]:
    pairs = zip(found.losses, wanted.losses, strict=False)
    wrong = [step for step, (mine, its) in enumerate(pairs, 1) if mine != its]
    told = [f"other losses from step {wrong[0]} on"] if wrong else []
    if found.evaluations != wanted.evaluations:
        told.append("other evaluations")
    weights = [n for n, t in wanted.weights.items() if not torch.equal(t, found.weights[n])]
    return [*told, f"other bits in {', '.join(weights)}"] if weights else told


def _near_curve(found: Outcome, wanted: Outcome) -> list[str]:
    pairs = zip(found.losses, wanted.losses, strict=False)
    most = max(abs(mine - its) for mine, its in pairs)
    return [f"losses differ by {most:.1e}"] if most > LOSS_TOLERANCE else []


def _samples(found: Outcome, wanted: Outcome) -> list[str]:
    """Each plan's data begin where an update that counts ended, and go on in the one order."""
    (order,) = wanted.asked
    for number, asked in enumerate(found.asked, 1):
        starts = range(0, len(order) + 1, BATCH)
        if not any(order[start : start + len(asked)] == asked for start in starts):
            return [f"samples out of order in plan {number}"]
    last = found.asked[-1]
    return [] if not last or last == order[-len(last) :] else ["the last plan's samples stop early"]


def _people(found: Outcome, _wanted: Outcome) -> list[str]:
    told = []
    failures = [event.name for event in found.events if isinstance(event, Failure)]
    if len(failures) != len(set(failures)) or not set(failures) <= set(found.dead):
        told.append(f"failures {failures} of {found.dead}")
    epochs = [event.epoch for event in found.events if isinstance(event, Plan)]
    if epochs != sorted(set(epochs)):
        told.append(f"epochs {epochs}")
    return told
