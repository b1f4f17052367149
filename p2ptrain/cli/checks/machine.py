"""What is installed, the clock, and the state folder."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from p2ptrain import torch_version
from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.cli.checks.check import Check, bad, ok, warn
from p2ptrain.errors import UserError, size_text
from p2ptrain.process.confinement import Confinement, protections

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
