"""Accelerators: whether torch finds them, what is free on them, and whether they compute right.

torch takes seconds to load, so it is loaded only where it could find one: its build for processors
alone says so in its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from p2ptrain import torch_version
from p2ptrain.aio.threads import run_in_background
from p2ptrain.cli.checks.check import Check, bad, ok, warn
from p2ptrain.devices.drivers import NVIDIA_DRIVER
from p2ptrain.errors import AcceleratorFailed

if TYPE_CHECKING:
    from p2ptrain.devices.check import CheckReport
    from p2ptrain.devices.interface import ComputeDevice
    from p2ptrain.devices.probes import Accelerator, FamilyProbe

SUBJECT = "accelerator"

ANSWER_SECONDS = 120.0

_PROCESSORS_ALONE = "+cpu"


async def accelerators(seconds: float = ANSWER_SECONDS) -> list[Check]:
    """A line each, or one that says why there is none."""
    try:
        async with asyncio.timeout(seconds):
            return await run_in_background(_here)
    except TimeoutError:
        found = f"its driver has not answered for {seconds:.0f} s"
        return [bad(SUBJECT, found, "restart this device, or take  --device cpu")]


def _here() -> list[Check]:
    version = torch_version.installed()
    if version is None or torch_version.why_not(version) is not None:
        return [ok(SUBJECT, "not looked for: torch has to be there first, see above")]
    if version.endswith(_PROCESSORS_ALONE) and not NVIDIA_DRIVER.exists():
        return [ok(SUBJECT, f"none is used: torch {version} is built for processors alone")]
    from p2ptrain.devices.check import check_device
    from p2ptrain.devices.probes import PROBES, make_accelerator

    return examined(PROBES, make_accelerator, check_device)


def examined(
    probes: Mapping[str, Callable[[], FamilyProbe]],
    make: Callable[[str], ComputeDevice],
    check: Callable[[ComputeDevice], CheckReport],
) -> list[Check]:
    """What the probes find, each made and checked."""
    probed = [probe() for probe in probes.values()]
    lines = [_one(card, probe, make, check) for probe in probed for card in probe.found]
    odd = [warn(SUBJECT, probe.absent, probe.advice) for probe in probed if probe.is_odd]
    if lines or odd:
        return [*lines, *odd]
    reasons = "; ".join(probe.absent for probe in probed)
    return [ok(SUBJECT, f"none is here that torch could use ({reasons})")]


def _one(
    card: Accelerator,
    probe: FamilyProbe,
    make: Callable[[str], ComputeDevice],
    check: Callable[[ComputeDevice], CheckReport],
) -> Check:
    from p2ptrain.devices.selection import LEAST_FREE_BYTES, lacks_room, room_text

    subject = f"{SUBJECT} {card.name}"
    if card.unusable:
        return bad(subject, f"{card.title}: {card.unusable}", "the CPU computes until then")
    try:
        device = make(card.name)
        memory = device.memory()
        shown = f"{room_text(card, memory)}, {probe.software}"
        if lacks_room(memory, LEAST_FREE_BYTES):
            return warn(subject, shown, "close the programs that use it: too little is free")
        report = check(device)
    except AcceleratorFailed as error:
        return bad(subject, f"{card.title}: {error}", "update its driver, or restart this device")
    if report.failures:
        wrong = ", ".join(f"{kind} ({why})" for kind, why in report.failures.items())
        advice = "update torch and the driver: models with these stay on the CPU until then"
        return bad(subject, f"{shown}; computes wrong: {wrong}", advice)
    integrated = "integrated, " if card.is_integrated else ""
    speed = f"{integrated}{report.speedup:.3g} times as fast as the CPU"
    if report.is_slow:
        return ok(subject, f"{shown}; not used by --device auto: {speed}")
    return ok(subject, f"{shown}; computes right, {speed}")
