"""Right before fast: what an accelerator computes, beside the processor, before it is used.

Each kind of `check_cases.CASES` runs forward and backward on both. A result is right that differs
by at most a part of the largest number in it: sums are made in another order, but TensorFloat-32,
which rounds operands to 10 bits, would show. Each runs several times, since a driver may return NaN
now and then, and since recovery repeats updates and expects the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isnan
from time import perf_counter

import torch
from torch import Tensor

from p2ptrain.devices.check_cases import CASES, CheckCase
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.errors import AcceleratorFailed

METHOD = 1
"""The version of what is checked and how: what an earlier one has found is looked at again."""

_HALF = " in bfloat16"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found of one accelerator.

    Attributes:
        failures: kind -> what is wrong with it.
        unrepeatable: kinds that give other bits now and then, all of them right.
        largest: kind -> the largest difference seen, as a part of the largest number.
        speedup: of the processor's time for some matrices; 0 = not measured.
        method: `METHOD` of that time.
    """

    failures: Mapping[str, str] = field(default_factory=dict)
    unrepeatable: tuple[str, ...] = ()
    largest: Mapping[str, float] = field(default_factory=dict)
    speedup: float = 0.0
    method: int = METHOD

    @property
    def useless(self) -> str | None:
        """What every training needs and it computes wrong; None where it is right."""
        needed = [case.kind for case in CASES if not case.operators]
        wrong = [f"{kind} ({self.failures[kind]})" for kind in needed if kind in self.failures]
        return f"computes wrong: {', '.join(wrong)}" if wrong else None

    @property
    def is_slow(self) -> bool:
        """The processor is faster."""
        return 0 < self.speedup < 1

    @property
    def wrong_operators(self) -> Mapping[str, bool]:
        """As `ComputeDevice.wrong`."""
        known = {case.kind: case.operators for case in CASES}
        kinds = sorted(self.failures, key=lambda kind: not kind.endswith(_HALF))
        return {
            name: kind.endswith(_HALF)
            for kind in kinds
            for name in known.get(kind.removesuffix(_HALF), ())
        }


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """How it is checked.

    Attributes:
        tolerance: of float32, as a part of the largest number; sums of a few hundred products
            differ by 1e-6, and with operands of 10 bits by 4e-4.
        half_tolerance: of bfloat16.
        repeats: of each kind.
        seconds: after which nothing is repeated any more.
        race_elements: of a side of the matrices that the time is taken with.
    """

    tolerance: float = 1e-4
    half_tolerance: float = 6e-2
    repeats: int = 4
    seconds: float = 4.0
    race_elements: int = 1024


def check_device(
    device: ComputeDevice,
    *,
    cases: Sequence[CheckCase] = CASES,
    limits: CheckLimits | None = None,
    clock: Callable[[], float] = perf_counter,
) -> CheckReport:
    """Compute all on it and here. In a thread of its own; settings of torch stay as they were.

    Raises:
        AcceleratorFailed: the device fails altogether.
    """
    bounds = limits or CheckLimits()
    checked = _Checked(device, bounds, clock)
    with settings_kept(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators without a deterministic way: see repeats
        device.prepare_thread()
        for case in cases:
            checked.look_at(case, torch.float32)
            if case.halves and not checked.fails(case.kind):
                checked.look_at(case, torch.bfloat16)
        speedup = race(device, bounds.race_elements, clock)
        device.release_cached()
    return CheckReport(
        checked.failures, tuple(checked.unrepeatable), checked.largest, round(speedup, 2)
    )


class _Checked:
    """What is found case by case."""

    def __init__(
        self, device: ComputeDevice, limits: CheckLimits, clock: Callable[[], float]
    ) -> None:
        self._device, self._limits, self._clock = device, limits, clock
        self._started = clock()
        self.failures: dict[str, str] = {}
        self.unrepeatable: list[str] = []
        self.largest: dict[str, float] = {}

    def fails(self, kind: str) -> bool:
        """In any precision."""
        return kind in self.failures

    def look_at(self, case: CheckCase, dtype: torch.dtype) -> None:
        """Compute it, and compare."""
        name = case.kind + (_HALF if dtype is torch.bfloat16 else "")
        inputs = case.inputs(dtype)
        try:
            expected = forward_and_backward(case, [_widened(tensor) for tensor in inputs], HOST)
        except RuntimeError:
            return  # this torch has no such operator on the processor: no graph has it
        first: list[Tensor] | None = None
        for _ in range(self._limits.repeats):
            try:
                found = forward_and_backward(case, inputs, self._device)
            except AcceleratorFailed:
                raise
            except (RuntimeError, NotImplementedError) as error:
                self.failures[name] = (str(error) or type(error).__name__).splitlines()[0][:120]
                return
            first = found if first is None else first
            if (wrong := self._wrong(name, found, expected, dtype)) is not None:
                self.failures[name] = wrong
                return
            is_same = all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
            if not is_same and name not in self.unrepeatable:
                self.unrepeatable.append(name)
            if self._clock() - self._started > self._limits.seconds:
                break

    def _wrong(
        self,
        name: str,
        found: Sequence[Tensor],
        expected: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> str | None:
        half = dtype is torch.bfloat16
        tolerance = self._limits.half_tolerance if half else self._limits.tolerance
        offs = [difference(a, b) for a, b in zip(found, expected, strict=True)]
        if any(map(isnan, offs)):
            return "NaN"
        off = max(offs)
        self.largest[name] = max(off, self.largest.get(name, 0.0))
        return f"off by {off:.1g} of the largest number" if off > tolerance else None


def _widened(tensor: Tensor) -> Tensor:
    """What is rounded is compared with what is not: the processor's rounding is no measure."""
    return tensor.float() if tensor.is_floating_point() else tensor


def forward_and_backward(
    case: CheckCase, inputs: Sequence[Tensor], device: ComputeDevice
) -> list[Tensor]:
    """Results and the gradients of the inputs, in host memory."""
    inside: list[Tensor] = []
    for tensor in inputs:
        placed = device.copy_in(tensor.detach())
        placed = placed.detach()
        inside.append(placed.requires_grad_() if placed.is_floating_point() else placed)
    results = list(case.compute(inside))
    roots = [result for result in results if result.requires_grad]
    if roots:
        torch.autograd.backward(roots, [device.copy_in(_made_up(root)) for root in roots])
    gradients = [tensor.grad for tensor in inside if tensor.grad is not None]
    copies = device.copy_out([value.detach() for value in (*results, *gradients)], written=True)
    copies.wait()
    return [copy.clone() for copy in copies.tensors if copy is not None]


def _made_up(root: Tensor) -> Tensor:
    """What comes back for a result; not all alike, for which norms and softmax give nothing."""
    generator = torch.Generator().manual_seed(root.numel())
    return torch.randn(root.shape, generator=generator).to(root.dtype)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a part of the largest number expected; NaN where one is not finite."""
    same_kind = found.is_floating_point() is expected.is_floating_point()
    if found.shape != expected.shape or not same_kind:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    a, b = found.double(), expected.double()
    if not bool(torch.isfinite(a).all()):
        return float("nan")
    largest = float(b.abs().max()) or 1.0
    return float((a - b).abs().max()) / largest


def race(device: ComputeDevice, elements: int, clock: Callable[[], float] = perf_counter) -> float:
    """How many times as fast as the processor it multiplies matrices, what it is given there."""
    return _seconds(HOST, elements, clock) / max(_seconds(device, elements, clock), 1e-9)


def _seconds(device: ComputeDevice, elements: int, clock: Callable[[], float]) -> float:
    a = device.copy_in(torch.ones(elements, elements))
    torch.tanh(a @ a)
    device.wait()
    best = float("inf")
    for _ in range(2):
        started = clock()
        torch.tanh(a @ a)
        device.wait()
        best = min(best, clock() - started)
    return best


@contextmanager
def settings_kept() -> Iterator[None]:
    """What `prepare_thread` sets for the whole process, as it was before."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    onednn = torch.backends.mkldnn.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.mkldnn.deterministic = onednn
