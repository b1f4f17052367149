"""What is installed, the clock, the state folder, and whether accelerators compute right.

torch takes seconds to load, so it is loaded only where it could find one: its build for processors
alone says so in its version.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from p2ptrain import torch_version
from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.cli.checks import Check, bad, ok, warn
from p2ptrain.devices.drivers import NVIDIA_DRIVER
from p2ptrain.errors import AcceleratorFailed, UserError, size_text
from p2ptrain.process.confinement import Confinement, protections

if TYPE_CHECKING:
    from p2ptrain.devices.check import CheckReport
    from p2ptrain.devices.interface import ComputeDevice
    from p2ptrain.devices.probes import Accelerator, FamilyProbe

_LITTLE_MEMORY_BYTES = 512 * 1024**2

_KEPT_BYTES = 256 * 1024  # the identity, who is trusted, a job's journal


def versions() -> list[Check]:
    """Of Python, p2ptrain and what matters most below it; torch is not loaded for this."""
    found = [
        ok("p2ptrain", f"{__version__}, protocol version {PROTOCOL_VERSION}"),
        ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _torch(),
    ]
    return [*found, _zeroconf()]


def _torch() -> Check:
    version = torch_version.installed()
    if version is None:
        return bad("torch", "is not installed", "run  pip install torch")
    wrong = torch_version.why_not(version)
    return ok("torch", version) if wrong is None else bad("torch", *wrong)


def _zeroconf() -> Check:
    from p2ptrain.mesh.discovery.mdns import check_zeroconf_version

    try:
        check_zeroconf_version()
    except UserError as error:
        return bad("zeroconf", str(error), "run  pip install --upgrade zeroconf")
    return ok("zeroconf", importlib.metadata.version("zeroconf"))


def clock(today: datetime.date) -> Check:
    """A clock from before this version is wrong. Neither links nor training ask what time it is."""
    if today < datetime.date(2025, 1, 1):
        advice = "set this device's date and time: p2ptrain works without, but downloads need it"
        return warn("clock", f"says {today}", advice)
    return ok("clock", f"says {today}")


def memory() -> Check:
    """What is free now."""
    free_bytes = psutil.virtual_memory().available
    found = f"{size_text(free_bytes)} free, {psutil.cpu_count() or 1} CPU threads"
    if free_bytes < _LITTLE_MEMORY_BYTES:
        return warn(
            "memory", found, "close other programs: there is hardly room for a part of a model"
        )
    return ok("memory", found)


def box(found: Sequence[Confinement] | None = None) -> Check:
    """What protects this device from the models of others that it measures; `found`: of tests."""
    held = protections() if found is None else found
    words = ", ".join(held)
    if Confinement.CALLS in held:
        return ok("models of other devices", f"are measured with: {words}")
    advice = "pair only devices whose owners you trust with this one"
    return warn(
        "models of other devices", f"are measured with too little protection: {words}", advice
    )


def state_folder(folder: Path) -> Check:
    """Whether the identity there is private, and what has to survive a restart can be written."""
    from p2ptrain.mesh.identity.state_folder import StateFolder

    try:
        exists = folder.exists()
        if exists:
            StateFolder(folder)
        _write_something(folder)
    except UserError as error:
        return bad("state folder", str(error), "see above")
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        return bad(
            "state folder",
            found,
            "make sure that its disk has room and can be written, or choose another with "
            "--state-dir",
        )
    made = "is private" if exists else "will be made at the first start"
    return ok("state folder", f"{folder} {made}")


def _write_something(folder: Path) -> None:
    """As much as a device keeps, where `folder` is or would be made; nothing is left. OSError."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with tempfile.TemporaryFile(dir=there) as file:
        file.write(bytes(_KEPT_BYTES))
        file.flush()


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
        left = "these" if report.useless is None else "everything"
        advice = f"update torch and the driver: until then the CPU computes {left}"
        return bad(subject, f"{shown}; computes wrong: {wrong}", advice)
    integrated = "integrated, " if card.is_integrated else ""
    speed = f"{integrated}{report.speedup:.3g} times as fast as the CPU"
    if report.is_slow:
        return ok(subject, f"{shown}; not used by --device auto: {speed}")
    return ok(subject, f"{shown}; computes right, {speed}")
