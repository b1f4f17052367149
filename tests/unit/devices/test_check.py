"""The check finds what an accelerator computes wrong: here processors that lie."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from p2ptrain.devices.check import (
    CheckLimits,
    CheckReport,
    check_device,
    difference,
    forward_and_backward,
)
from p2ptrain.devices.check_cases import CASES, CheckCase
from p2ptrain.devices.interface import HostCopies, Value
from p2ptrain.devices.processor import HOST, Processor
from p2ptrain.errors import AcceleratorFailed

FEW = CheckLimits(repeats=2, race_elements=32)

LINEAR = [case for case in CASES if case.kind in ("linear", "sums and norms")]


class Lying(Processor):
    """A processor that spoils what leaves it."""

    is_host = False

    def __init__(self, part: float = 0.0, *, every: int = 1, add: float = 0.0) -> None:
        self._part, self._add, self._every, self._calls = part, add, every, 0

    def copy_out(
        self,
        tensors: Sequence[Value],
        into: Sequence[Value] | None = None,
        *,
        written: bool = False,
    ) -> HostCopies:
        self._calls += 1
        if self._calls % self._every == 0:
            tensors = [None if t is None else t * (1 + self._part) + self._add for t in tensors]
        return super().copy_out(tensors, into, written=written)


def kinds(report: CheckReport) -> set[str]:
    return set(report.failures)


def test_a_right_device_passes_every_kind_on_both_passes() -> None:
    report = check_device(Lying(), limits=FEW)
    assert report.failures == {}
    assert report.unrepeatable == ()
    assert set(report.largest) >= {case.kind for case in CASES}
    assert report.useless is None
    assert report.speedup > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_rounding_alone_is_far_from_the_tolerance(case: CheckCase) -> None:
    """Else a right device would fail: a gradient that is nothing but rounding is in no case."""
    inputs = case.inputs()
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    found, exact = (forward_and_backward(case, given, HOST) for given in (inputs, wide))
    off = max(difference(a, b) for a, b in zip(found, exact, strict=True))
    assert off < CheckLimits().tolerance / 20


@pytest.mark.parametrize(
    ("device", "failures"),
    [
        (Lying(4e-4), {"linear": "off by 0.0004 of the largest number"}),  # as TF32 would
        (Lying(1e-6), {}),
        (Lying(every=2, add=float("nan")), {"linear": "NaN", "sums and norms": "NaN"}),
    ],
)
def test_wrong_numbers_are_named(device: Lying, failures: dict[str, str]) -> None:
    report = check_device(device, cases=LINEAR, limits=FEW)
    assert {kind: report.failures.get(kind) for kind in failures} == failures
    assert ("sums and norms" in kinds(report)) is (report.useless is not None)
    assert bool(kinds(report)) is bool(failures)


def test_other_bits_from_time_to_time_are_no_error_but_said() -> None:
    report = check_device(Lying(1e-6, every=2), cases=LINEAR, limits=FEW)
    assert report.failures == {}
    assert "linear" in report.unrepeatable


def test_what_the_device_has_no_operator_for_fails_by_name_and_a_dead_device_altogether() -> None:
    class Lacking(Lying):
        def copy_in(self, tensor: Tensor) -> Tensor:
            if tensor.shape == (96, 260):
                raise NotImplementedError("The operator 'aten::linear' is not there")
            return tensor

    class Dead(Lying):
        def copy_in(self, tensor: Tensor) -> Tensor:
            raise AcceleratorFailed("it has failed")

    assert kinds(check_device(Lacking(), cases=LINEAR, limits=FEW)) == {"linear"}
    with pytest.raises(AcceleratorFailed):
        check_device(Dead(), cases=LINEAR, limits=FEW)


def test_repeats_end_with_the_time_and_settings_of_torch_stay() -> None:
    class Deterministic(Lying):
        def prepare_thread(self) -> None:
            torch.use_deterministic_algorithms(True, warn_only=True)

    ticks = itertools.count()
    limits = CheckLimits(repeats=10**6, race_elements=8)
    report = check_device(
        Deterministic(), cases=LINEAR, limits=limits, clock=lambda: float(next(ticks))
    )
    assert report.failures == {}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_difference_is_a_part_of_the_largest_number() -> None:
    assert difference(torch.tensor([0.0, 101.0]), torch.tensor([0.0, 100.0])) == pytest.approx(0.01)
    assert difference(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert difference(torch.tensor([1]), torch.tensor([2])) == float("inf")
    assert difference(torch.zeros(0), torch.zeros(0)) == 0
