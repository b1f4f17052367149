"""Why a plan leaves a device out: what using it would cost, in a sentence for people."""

from __future__ import annotations

from itertools import pairwise, permutations, product

from p2ptrain.errors import size_text
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, device_loads
from p2ptrain.plan.problem.candidates import whole_seconds
from p2ptrain.plan.problem.infeasible import unit_bytes
from p2ptrain.plan.problem.judge import Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.simulation.bound import mini_batches_each, round_interfaces
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.request import PlanMode

SAME = 1.005
"""Rounds within half a per cent are called equally fast."""

PRIVATE_UNITS = 3
"""Fewest with which something lies between the holder's first unit and its last."""


def reason(question: Question, best: Judged, device: int, other: Judged | None) -> str:
    """Why `best` leaves `device` out; `other`: the best plan found that uses it, or none."""
    if other is not None:
        return _no_gain(question.cost, device, best, other)
    small = _too_small(question.cost, device, question.splits[0])
    return small or _no_place(question)


def as_others(question: Question, device: int, fastest: int) -> str:
    """The reason of a device slower than all that were looked at."""
    small = _too_small(question.cost, device, question.splits[0])
    return small or _no_faster_than(question.cost, device, fastest)


def _too_small(cost: CostModel, device: int, split: BatchSplit) -> str | None:
    """The reason, where the device cannot hold any unit."""
    samples = split.first_samples
    least = min(unit_bytes(cost, unit, samples) for unit in range(cost.unit_count))
    memory = cost.devices[device].memory_bytes
    if memory >= least:
        return None
    return (
        f"its memory for layers, {size_text(memory)}, holds none: the smallest needs "
        f"{size_text(least)}"
    )


def _no_place(question: Question) -> str:
    """The reason, where no plan was found that uses a device which could hold some unit."""
    units = question.cost.unit_count
    if question.private and units < PRIVATE_UNITS:
        holder = question.cost.name(question.cost.holder)
        return (
            f"--private keeps the first and the last layers on {holder}, and there are none between"
        )
    broken = ", or breaks a --cap" if question.caps else ""
    return f"every plan found with it needs more memory than a device in it has{broken}"


def _no_gain(cost: CostModel, device: int, best: Judged, other: Judged) -> str:
    """The reason, where `other` is the best plan found that uses the device."""
    before, after = _time(best.seconds), _time(other.seconds)
    what = _what(cost)
    blame = _blame(cost, device, other)
    if other.seconds <= best.seconds * SAME:
        return f"with it {what} would take no less than {before}, because {blame}"
    return f"with it {what} would take {after} instead of {before}, because {blame}"


def _no_faster_than(cost: CostModel, device: int, other: int) -> str:
    """The reason, where plans with faster devices left out too, such as `other`, were looked at."""
    times = whole_seconds(cost, device) / max(whole_seconds(cost, other), 1e-300)
    name = cost.name(other)
    if times >= SAME:
        return f"it computes {times:.1f} times slower than {name}, which is not used either"
    return f"it computes no faster than {name}, which is not used either"


def _what(cost: CostModel) -> str:
    """What is timed."""
    return "a step" if cost.mode is PlanMode.SYNC else "a batch"


def _each_round(cost: CostModel) -> str:
    """How often a group's gradients are summed; asynchronously it depends on how they share."""
    return " in each step" if cost.mode is PlanMode.SYNC else ""


def _blame(cost: CostModel, device: int, other: Judged) -> str:
    """What the device's time goes into in a plan that uses it."""
    draft = other.draft
    rounds = draft.split.batch_size / draft.split.first_samples
    busiest = round_interfaces(cost, draft).of(device)
    rate, latency = _slowest_link(cost, device, draft)
    summing = _all_reduce(cost, device, draft)
    computing = device_loads(cost, draft)[device]
    exchanged = summing * _exchanges(cost, device, draft)
    if exchanged > max(busiest, latency * rounds, computing):
        return (
            f"summing its gradients with other devices' takes {_time(summing)}{_each_round(cost)}"
        )
    if max(busiest, latency * rounds) > computing:
        if latency * rounds > busiest:
            return f"its network answers only after {_time(latency)}"
        return f"its network carries only {size_text(rate)}/s"
    return _slowness(cost, device, other)


def _exchanges(cost: CostModel, device: int, draft: Draft) -> float:
    """How often the device's group sums gradients in a round, or in a window of mini-batches."""
    if cost.mode is PlanMode.SYNC:
        return 1.0
    each = [mini_batches_each(group) for group in draft.groups if device in group.devices]
    return draft.split.micro_batches / min(each)


def _all_reduce(cost: CostModel, device: int, draft: Draft) -> float:
    """Seconds that the sum of gradients takes in the device's group."""
    return max(
        cost.all_reduce_seconds(group.devices, *units)
        for group, units in zip(draft.groups, draft.units, strict=True)
        if device in group.devices
    )


def _slowest_link(cost: CostModel, device: int, draft: Draft) -> tuple[float, float]:
    """(bytes/s, seconds) of the worst links that the device uses in that plan."""
    pairs = {(cost.holder, fed) for p in (0, -1) for fed in draft.groups[p].devices}
    for before, after in pairwise(draft.groups):
        for here, there in product(before.devices, after.devices):
            pairs |= {(here, there), (there, here)}
    for group in draft.groups:
        pairs |= set(permutations(group.devices, 2))
    links = [cost.link(*pair) for pair in pairs if device in pair and pair[0] != pair[1]]
    rates = [link.bytes_per_s for link in links]
    return min(rates, default=float("inf")), max((link.latency_s for link in links), default=0.0)


def _slowness(cost: CostModel, device: int, other: Judged) -> str:
    fastest = min(other.draft.devices, key=lambda d: whole_seconds(cost, d))
    slowdown = whole_seconds(cost, device) / max(whole_seconds(cost, fastest), 1e-300)
    if slowdown >= 1.5:
        return f"it computes {slowdown:.1f} times slower than {cost.name(fastest)}"
    return "sending data takes more time than sharing the work saves"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms"
