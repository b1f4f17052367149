"""Why nothing fits: the unit or the memory budget that cannot be met, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.errors import size_text
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.request import PlanMode


def explain(question: Question, *, every_device: bool = False, one_device: bool = False) -> str:
    """One line for a PlanError, about the smallest micro-batch that may be used.

    Arguments:
        every_device: the planner must give every device a stage.
        one_device: the planner puts the whole model on one device.
    """
    cost, samples = question.cost, question.splits[0].first_samples
    needed = question.devices if every_device else sorted(question.required)
    reasons = [
        _ends(question, samples) if question.private else None,
        None if one_device else _largest_unit(question, samples),
        _whole_model(question, samples, one_device=one_device),
        _useless_device(question, samples, needed),
    ]
    for reason in reasons:
        if reason is not None:
            return f"{reason} ({_what(cost, samples)})"
    if question.required or question.caps:
        return (
            f"no plan was found where {_asked(question)}: loosen one of these, allow more "
            "devices or try a smaller --micro-batch"
        )
    return (
        f"the model's {cost.unit_count} layers cannot be divided among {_names(question)} so that "
        f"each part fits, though all of it would fit their memory together ({_what(cost, samples)})"
    )


def unit_bytes(cost: CostModel, unit: int, samples: int) -> int:
    """The least memory in which a device can have that unit."""
    return cost.peak_bytes(unit, unit + 1, samples)


def _what(cost: CostModel, samples: int) -> str:
    piece, option = f"{samples} samples", "--micro-batch"
    if cost.mode is PlanMode.ASYNC:
        piece, option = f"a batch of {samples}", "--batch-size"
    if cost.full_depths:
        piece += ", and both again for each further batch at the same time"
    return (
        f"that is {_weights(cost)}, for gradients and optimizer, and the layers' "
        f"outputs for {piece}; try a smaller {option}, a leaner optimizer or more devices"
    )


def _weights(cost: CostModel) -> str:
    state = cost.state(0, cost.unit_count)
    times = 2 + cost.profile.optimizer_state_ratio
    if state.frozen_bytes:
        return (
            f"the frozen weights and {times:g} times the {size_text(state.trainable_bytes)} "
            "of trained ones"
        )
    return f"{times:g} times the weights"


def _largest_unit(question: Question, samples: int) -> str | None:
    cost = question.cost
    biggest = max(question.devices, key=lambda device: (cost.devices[device].memory_bytes, -device))
    memory = cost.devices[biggest].memory_bytes
    needs = [unit_bytes(cost, unit, samples) for unit in range(cost.unit_count)]
    if max(needs) <= memory:
        return None
    unit = needs.index(max(needs))
    return (
        f'layer "{cost.profile.units[unit].name}" needs {size_text(needs[unit])}, and no device '
        f"has more than the {size_text(memory)} that {cost.name(biggest)} has for layers: "
        f"{size_text(needs[unit] - memory)} missing"
    )


def _whole_model(question: Question, samples: int, *, one_device: bool) -> str | None:
    cost = question.cost
    devices = (cost.holder,) if one_device and question.private else question.devices
    memories = [cost.devices[device].memory_bytes for device in devices]
    offered = max(memories) if one_device else sum(memories)
    needed = cost.peak_bytes(0, cost.unit_count, samples)
    if needed <= offered:
        return None
    who = "the largest device has" if one_device else "all devices together have"
    if len(devices) == 1:
        who = f"{cost.name(devices[0])} has"
    return (
        f"the model needs {size_text(needed)}, and {who} {size_text(offered)}: "
        f"{size_text(needed - offered)} missing"
    )


def _ends(question: Question, samples: int) -> str | None:
    """With --private the holder keeps the first and the last unit at least."""
    cost = question.cost
    holder, last = cost.devices[cost.holder], cost.unit_count - 1
    needed = unit_bytes(cost, 0, samples) + (unit_bytes(cost, last, samples) if last else 0)
    if needed <= holder.memory_bytes:
        return None
    units = cost.profile.units
    kept = f'the first and the last layer ("{units[0].name}" and "{units[last].name}")'
    if not last:
        kept = f'all layers ("{units[0].name}")'
    return (
        f"with --private {holder.name} keeps {kept}, which need {size_text(needed)}, and it has "
        f"{size_text(holder.memory_bytes)}: {size_text(needed - holder.memory_bytes)} missing"
    )


def _useless_device(question: Question, samples: int, needed: Sequence[int]) -> str | None:
    """The first of the devices needed that cannot hold any unit."""
    cost = question.cost
    least, unit = min((unit_bytes(cost, u, samples), u) for u in range(cost.unit_count))
    for device in needed:
        memory = cost.devices[device].memory_bytes
        if memory < least:
            return (
                f"{cost.name(device)} has {size_text(memory)}, and the smallest layer "
                f'"{cost.profile.units[unit].name}" needs {size_text(least)}: '
                f"{size_text(least - memory)} missing"
            )
    return None


def _asked(question: Question) -> str:
    cost = question.cost
    parts = [f"{cost.name(device)} takes part" for device in sorted(question.required)]
    parts += [
        f"{cost.name(device)} does at most {cap:g} of the work"
        for device, cap in sorted(question.caps.items())
    ]
    return " and ".join(parts)


def _names(question: Question) -> str:
    return ", ".join(f'"{question.cost.name(device)}"' for device in question.devices)
