"""The whole model on one device: the reference that `auto` must never be slower than."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.errors import PlanError, size_text
from p2ptrain.plan.cost.draft import draft_pipeline
from p2ptrain.plan.problem.infeasible import explain
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.types.batch_split import BatchSplit


def best_singles(
    judge: Judge, splits: Sequence[BatchSplit], devices: Sequence[int]
) -> dict[int, Judged]:
    """The fastest split of every device that can hold the whole model, by device.

    Give only the holder where raw data must not leave it.
    """
    best: dict[int, Judged] = {}
    for device in devices:
        drafts = [
            draft_pipeline(judge.cost, split, (0, judge.cost.unit_count), (device,))
            for split in splits
        ]
        found = judge.best_of([draft for draft in drafts if draft is not None])
        if found is not None:
            best[device] = judge.exact(found.draft)
    return best


def plan_single(question: Question) -> Answer:
    """The fastest device alone (with `private` the holder); PlanError where it fits none."""
    cost = question.cost
    able = (cost.holder,) if question.private else question.devices
    allowed = [device for device in able if may_be_alone(question, device)]
    if not allowed:
        raise PlanError(
            "planner single uses one device, and --cap or --require forbid that for each device: "
            "try --planner auto"
        )
    singles = best_singles(question.judge, question.splits, allowed)
    if not singles:
        raise PlanError(explain(question, one_device=True))
    best = min(singles, key=lambda device: (singles[device].seconds, device))
    others = [device for device in question.devices if device != best]
    reasons = {device: _reason(question, singles, best, device) for device in others}
    return Answer(singles[best].draft, reasons)


def may_be_alone(question: Question, device: int) -> bool:
    """Whether the request allows that device to do a whole round's work."""
    return question.required <= {device} and question.caps.get(device, 1.0) >= 1


def _reason(question: Question, singles: dict[int, Judged], best: int, device: int) -> str:
    cost = question.cost
    chosen = f"{cost.name(best)}'s {singles[best].seconds:.3g} s"
    if question.private:
        return "planner single with --private uses only the device with the data"
    if not may_be_alone(question, device):
        return "planner single uses one device, and --cap or --require forbid this one alone"
    if device in singles:
        seconds = singles[device].seconds
        return f"planner single uses one device: {seconds:.3g} s a step here, not {chosen}"
    needed = cost.peak_bytes(0, cost.unit_count, question.splits[0].first_samples)
    memory = cost.devices[device].memory_bytes
    return f"the whole model needs {size_text(needed)}, this device has {size_text(memory)}"
