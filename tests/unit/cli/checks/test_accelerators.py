"""What the doctor says of accelerators that are made up."""

import dataclasses

import pytest

from p2ptrain.cli.checks import Check, Severity
from p2ptrain.cli.checks.machine import accelerators, examined
from p2ptrain.devices.check import CheckReport
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.probes import FamilyProbe
from p2ptrain.errors import AcceleratorFailed
from tests.unit.devices.test_choice import GB, IRIS, RIGHT, RTX, SLOW, Fake

DRIVER = "torch 2.12.0, driver 550.54.15"

CARD = FamilyProbe((RTX,), software=DRIVER)

TOO_OLD = FamilyProbe((), "the NVIDIA driver is too old", "update it", is_odd=True)


def of(
    probe: FamilyProbe,
    report: CheckReport = RIGHT,
    *,
    free_bytes: int = 11 * GB,
    fails: str = "",
) -> Check:
    """The only line."""

    def make(name: str) -> ComputeDevice:
        if fails:
            raise AcceleratorFailed(fails)
        return Fake(name, free_bytes)

    (line,) = examined({"cuda": lambda: probe}, make, lambda device: report)
    return line


@pytest.mark.parametrize(
    ("line", "verdict", "words"),
    [
        (of(FamilyProbe(absent="built without")), Severity.OK, "none is here that torch could use"),
        (of(TOO_OLD), Severity.WARN, "the NVIDIA driver is too old"),
        (
            of(CARD),
            Severity.OK,
            f"NVIDIA GeForce RTX 3060, 11.0 of 12.0 GB free, {DRIVER}; computes right, 20 times",
        ),
        (of(CARD, free_bytes=GB // 10), Severity.WARN, "0.1 of 12.0 GB free"),
        (of(CARD, fails="cuda:0 does not start"), Severity.BAD, "cuda:0 does not start"),
        (
            of(CARD, dataclasses.replace(RIGHT, failures={"conv2d": "NaN"})),
            Severity.BAD,
            "computes wrong: conv2d (NaN)",
        ),
        (
            of(FamilyProbe((IRIS,)), SLOW),
            Severity.OK,
            "not used by --device auto: integrated, 0.5 times as fast as the CPU",
        ),
        (
            of(FamilyProbe((dataclasses.replace(RTX, unusable="has nothing for 6.1"),))),
            Severity.BAD,
            "has nothing for 6.1",
        ),
    ],
)
def test_a_line_says_what_is_there_and_what_to_do(
    line: Check, verdict: Severity, words: str
) -> None:
    assert line.verdict is verdict
    assert words in line.found
    assert bool(line.advice) is (verdict is not Severity.OK)


async def test_here_is_at_most_one_line_an_accelerator() -> None:
    assert all(line.subject.startswith("accelerator") for line in await accelerators())


@pytest.mark.parametrize(("kind", "left"), [("conv2d", "these"), ("updates", "everything")])
def test_the_advice_says_what_is_left_to_the_processor(kind: str, left: str) -> None:
    line = of(CARD, dataclasses.replace(RIGHT, failures={kind: "NaN"}))
    assert line.advice == f"update torch and the driver: until then the CPU computes {left}"
