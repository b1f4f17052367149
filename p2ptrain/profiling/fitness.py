"""Whether an accelerator may compute a model.

`devices.check` knows which kinds of computations an accelerator gets wrong, and stages leave these
to the host. A model may have others and sizes of its own, so its units run once on both, with
made-up weights and samples:

    unit 0    here, there: forward, made-up gradients, backward; compared
    unit 1    the same, with what unit 0 gave here
    ...       until all have run, or the time is over
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from p2ptrain.devices.interface import ComputeDevice, Value, operator_name, tells_of_failure
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import Argument, BackwardGraph, GraphNode
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failure_text
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.profiling.unit_chain import UnitChain

Judge: TypeAlias = Callable[[ModelDescription, ComputeDevice], str | None]
"""Why a device may not compute a model; None where it may."""

COMPARED_SAMPLES = 4
"""Of the batch that shows it."""


@dataclass(frozen=True, slots=True)
class FitnessLimits:
    """How units are compared.

    Attributes:
        seconds: after which units that are left count as right.
        tolerance: the norm of the difference, as a part of the number's own; sums are made in
            another order, and a unit has many.
        least: what counts as nothing but rounding, as a part of the unit's largest numbers: as
            the gradient of a bias before a norm.
        half_tolerance, half_least: where a model computes in 16 bits.
        draws: of weights and samples, before a difference is believed.
    """

    seconds: float = 3.0
    tolerance: float = 2e-3
    least: float = 0.05
    half_tolerance: float = 0.2
    half_least: float = 0.5
    draws: int = 2


def fit_for_all(_description: ModelDescription, _device: ComputeDevice) -> str | None:
    """It may compute every model."""
    return None


def misfit(description: ModelDescription, device: ComputeDevice) -> str | None:
    """Why the device may not compute that model; None where it may. In the compute thread.

    Raises:
        AcceleratorFailed: the device fails altogether.
    """
    if lacking := sorted(device.lacks & dtypes_of(description)):
        return f"it has no {', '.join(lacking)}"
    return disagreement(description, device, COMPARED_SAMPLES)


def names_of_operators(description: ModelDescription) -> frozenset[str]:
    """As `operator_name` has them; of backwards that it brings too."""
    return frozenset(operator_name(node.operator) for node in _nodes(description))


def dtypes_of(description: ModelDescription) -> frozenset[str]:
    """Of its state, of what enters, and of what it converts to, such as "bfloat16"."""
    converted = (
        argument
        for node in _nodes(description)
        for argument in (*node.args, *(value for _, value in node.kwargs))
        if isinstance(argument, torch.dtype)
    )
    entering = (*description.crossing(0, "train"), *description.targets)
    known = (*(value.dtype for value in entering), *(value.dtype for value in description.tensors))
    return frozenset(str(dtype).removeprefix("torch.") for dtype in (*known, *converted))


def _nodes(description: ModelDescription) -> Iterator[GraphNode]:
    for graph in (description.train, description.evaluate):
        yield from _with_backwards(graph.nodes)


def _with_backwards(nodes: Iterable[GraphNode]) -> Iterator[GraphNode]:
    for node in nodes:
        yield node
        for argument in node.args:
            yield from _within(argument)


def _within(argument: Argument) -> Iterator[GraphNode]:
    if isinstance(argument, BackwardGraph):
        yield from _with_backwards(argument.nodes)


def disagreement(
    description: ModelDescription,
    device: ComputeDevice,
    samples: int,
    limits: FitnessLimits | None = None,
    clock: Callable[[], float] = perf_counter,
) -> str | None:
    """What a unit computes in another way on the device than here; None where nothing was seen.

    In the compute thread. What does not fit the memory of one of them is not compared. Where
    numbers differ, others are drawn, as one that rounding moves past a kink differs much.

    Args:
        samples: of the made-up batch.

    Raises:
        AcceleratorFailed: the device fails altogether.
    """
    bounds = limits or FitnessLimits()
    found: _Disagreement | None = None
    for seed in range(bounds.draws):
        try:
            found = _first(description, device, samples, bounds, clock, seed)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            raise
        if found is None or not found.may_be_chance:
            break
    return None if found is None else found.text


@dataclass(frozen=True, slots=True)
class _Disagreement:
    text: str
    may_be_chance: bool = False


def _first(
    description: ModelDescription,
    device: ComputeDevice,
    samples: int,
    bounds: FitnessLimits,
    clock: Callable[[], float],
    seed: int,
) -> _Disagreement | None:
    """Of the units in their order, with the weights and samples of that seed."""
    halves = dtypes_of(description) & {"bfloat16", "float16"}
    tolerance = bounds.half_tolerance if halves else bounds.tolerance
    least = bounds.half_least if halves else bounds.least
    started = clock()
    here = UnitChain(description, seed, keep=False, hashes=True)  # masks as the device has them
    there = UnitChain(description, seed, keep=False, device=device)
    for chain in (here, there):
        chain.begin(samples, apart=True)
    for unit in range(here.unit_count):
        name = description.units[unit].name
        if clock() - started > bounds.seconds:
            return None
        try:
            expected = _pass(here, unit)
        except OPERATORS_RAISE:
            return None  # so it does on every device, and the training says so
        try:
            found = device.fetched(_pass(there, unit))
        except OPERATORS_RAISE as error:
            if tells_of_failure(error) or is_out_of_memory(error):
                raise
            return _Disagreement(f"{name}: {failure_text(error)[:200]}")
        off = _off(found, expected, len(here.values), least)
        if isnan(off):
            return _Disagreement(f"{name} gives NaN")
        if off > tolerance:
            text = f"{name} is off by {off:.1g} of its numbers"
            return _Disagreement(text, may_be_chance=True)
        there.values = [device.copy_in(value) for value in here.values]
    return None


def _pass(chain: UnitChain, unit: int) -> list[Value]:
    """What a unit gives, and the gradients of its inputs and parameters."""
    chain.forward(unit)
    values = [value.detach() for value in chain.values]
    chain.backward(unit)
    return [*values, *chain.gradients(unit)]


def _off(found: Sequence[Value], expected: Sequence[Value], outputs: int, least: float) -> float:
    """Of what a unit gives, `outputs` tensors, and of its gradients; NaN where one of them is."""
    pairs = list(zip(found, expected, strict=True))
    parts = (pairs[:outputs], pairs[outputs:])
    given, gradients = (_largest_distance(part, least) for part in parts)
    return given + gradients if isnan(given + gradients) else max(given, gradients)


def _largest_distance(pairs: Sequence[tuple[Value, Value]], least: float) -> float:
    """As a part of each one's numbers, but at least of that part of the largest one's."""
    if any((a is None) is not (b is None) for a, b in pairs):
        return float("inf")
    floats = [(a, b) for a, b in pairs if a is not None and b is not None and b.numel()]
    floats = [(a.double(), b.double()) for a, b in floats if b.is_floating_point()]
    if any(a.shape != b.shape for a, b in floats):
        return float("inf")
    if any(bool((torch.isfinite(a) != torch.isfinite(b)).any()) for a, b in floats):
        return float("nan")
    finite = [(a.nan_to_num(), b.nan_to_num()) for a, b in floats]
    sizes = [_size(b) for _, b in finite]
    floor = least * max(sizes, default=0.0)
    parts = [
        _size(a - b) / (max(size, floor) or 1.0) for (a, b), size in zip(finite, sizes, strict=True)
    ]
    return max(parts, default=0.0)


def _size(tensor: Tensor) -> float:
    """The root of its mean square."""
    return float(tensor.square().mean().sqrt())
