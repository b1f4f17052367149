"""Why a device is left out, in a sentence a person can act on."""

from __future__ import annotations

from p2ptrain.plan.bound import interface_seconds
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.infeasible import unit_bytes
from p2ptrain.plan.judge import Judged
from p2ptrain.plan.orders import whole_seconds
from p2ptrain.plan.split import BatchSplit

SAME = 1.005
"""Rounds within half a per cent are called equally fast."""


def too_small(cost: CostModel, device: int, split: BatchSplit) -> str | None:
    """The reason, where the device cannot hold any unit."""
    samples = split.first_samples
    least = min(unit_bytes(cost, unit, samples) for unit in range(cost.unit_count))
    memory = cost.devices[device].memory_bytes
    if memory >= least:
        return None
    return (
        f"its memory of {_amount(memory)} holds no unit: the smallest needs {_amount(least)} "
        f"at a micro-batch of {samples}"
    )


def no_gain(cost: CostModel, device: int, best: Judged, other: Judged) -> str:
    """The reason, where `other` is the best plan found that uses the device."""
    before, after = _time(best.seconds), _time(other.seconds)
    blame = _blame(cost, device, other)
    if other.seconds <= best.seconds * SAME:
        return f"would not make the round faster than {before}: {blame}"
    return f"would slow the round from {before} to {after}: {blame}"


def _blame(cost: CostModel, device: int, other: Judged) -> str:
    """What the device's time goes into in a plan that uses it."""
    draft = other.draft
    computing = sum(
        sum(cost.stage_seconds(device, first, end, draft.split.first_samples))
        for used, (first, end) in zip(draft.devices, draft.units, strict=True)
        if used == device
    )
    rounds = draft.split.batch_size / draft.split.first_samples
    interface = interface_seconds(cost, draft)
    busiest = max(interface.get(("up", device), 0.0), interface.get(("down", device), 0.0))
    rate, latency = _slowest_link(cost, device, other)
    if max(busiest, latency * rounds) > computing * rounds:
        if latency * rounds > busiest:
            return f"its link answers after {_time(latency)}"
        return f"its link carries {_amount(rate)}/s"
    return _slowness(cost, device, other)


def _slowest_link(cost: CostModel, device: int, other: Judged) -> tuple[float, float]:
    """(bytes/s, seconds) of the worst links that the device uses in that plan."""
    draft = other.draft
    pairs = [*zip(draft.devices, draft.devices[1:], strict=False), (cost.holder, draft.devices[0])]
    pairs += [(there, here) for here, there in pairs[:-1]]
    links = [cost.link(*pair) for pair in pairs if device in pair and pair[0] != pair[1]]
    rates = [link.bytes_per_s for link in links]
    return min(rates, default=float("inf")), max((link.latency_s for link in links), default=0.0)


def _slowness(cost: CostModel, device: int, other: Judged) -> str:
    fastest = min(other.draft.devices, key=lambda d: whole_seconds(cost, d))
    slowdown = whole_seconds(cost, device) / max(whole_seconds(cost, fastest), 1e-300)
    if slowdown >= 1.5:
        return f"it computes {slowdown:.1f} times slower than {cost.name(fastest)}"
    return "handing work on costs more than sharing it saves"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms"


def _amount(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
