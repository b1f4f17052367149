"""Which failed tests are run again alone."""

from __future__ import annotations

import pytest

from tools.alone import MOST, why_not

DEVICES = "tests/integration/training/test_curve.py::test_one"


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        ([DEVICES], ""),
        ([f"{DEVICES}[{k}]" for k in range(MOST)], ""),
        ([f"{DEVICES}[{k}]" for k in range(MOST + 1)], "more than"),
        ([DEVICES, "tests/unit/plan/test_one.py::test_two"], "no devices: tests/unit/plan"),
        ([], "no test has failed"),
    ],
)
def test_few_tests_with_devices_are_run_again(failed: list[str], reason: str) -> None:
    refused = why_not(failed)
    assert reason in refused
    assert bool(refused) == bool(reason)
