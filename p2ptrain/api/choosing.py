"""The device that a member computes on: chosen once torch is loaded, before it joins.

A check takes seconds, so its outcome is kept in the state folder, by the accelerator, its driver
and torch's build; with another one of these it is checked again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from p2ptrain import events
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.devices.check import METHOD, CheckReport, check_device
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.request import AUTO, HOST_NAME, DeviceRequest
from p2ptrain.devices.selection import ChosenDevice, DeviceChooser
from p2ptrain.errors import DeviceUnusable, UserError
from p2ptrain.events import Event
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.process.host_process import use_threads

log = get_logger(__name__)

CHECKS = "accelerators"
"""The folder of kept checks, in that of the state."""

ANSWER_SECONDS = 90.0
"""A driver that has not answered by then never will; the first use of a card may take 20."""


class KeptChecks:
    """What was found of accelerators before.

    Args:
        folder: of the state; None: every check is made again.
        check: of one that is not known.
    """

    def __init__(
        self,
        folder: Path | None,
        check: Callable[[ComputeDevice], CheckReport] = check_device,
    ) -> None:
        self._folder, self._check = folder, check

    def report(self, device: ComputeDevice, software: str) -> CheckReport:
        """Kept, or found now. Raises AcceleratorFailed."""
        text = f"{device.name}|{device.kind}|{software}|{torch.get_num_threads()} threads"
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        known = self._read(name)
        if known is not None and known.method == METHOD:
            return known
        found = self._check(device)
        self._write(name, found)
        return found

    def _read(self, name: str) -> CheckReport | None:
        try:
            return (
                None
                if self._folder is None
                else StateFolder(self._folder).read_form(name, CheckReport)
            )
        except UserError as error:
            log.warning("check_unreadable", why=str(error))  # it is made again
            return None

    def _write(self, name: str, found: CheckReport) -> None:
        if self._folder is None:
            return
        try:
            StateFolder(self._folder).write_form(name, found)
        except UserError as error:
            log.warning("check_not_kept", why=str(error))


async def choose_device(
    request: DeviceRequest,
    folder: Path | None,
    emit: Callable[[Event], None],
    *,
    threads: int | None = None,
    chooser: DeviceChooser | None = None,
    answer_seconds: float = ANSWER_SECONDS,
) -> ChosenDevice:
    """The device for `request`; what the user should know of it is emitted.

    Args:
        folder: where checks are kept, or None.
        threads: of the processor, which an accelerator has to be faster with.

    Raises:
        DeviceUnusable: what was asked for by name is not here, or cannot compute.
    """
    if request.family == HOST_NAME:
        return ChosenDevice()
    if threads is not None:
        use_threads(threads)
    chosen = await _chosen(
        request, chooser or DeviceChooser(KeptChecks(folder).report), answer_seconds
    )
    if not chosen.device.is_host:
        emit(events.Device(chosen.device.name, chosen.device.title, chosen.reason))
    if chosen.is_odd:
        emit(events.Warning(chosen.reason))
    return chosen


async def _chosen(
    request: DeviceRequest, chooser: DeviceChooser, answer_seconds: float
) -> ChosenDevice:
    try:
        async with asyncio.timeout(answer_seconds):
            return await run_in_background(partial(chooser.choose, request))
    except TimeoutError:
        late = f"no answer of it within {answer_seconds:.0f} s"
        if request.family != AUTO:
            raise DeviceUnusable(f"device {request}: {late}: take --device cpu") from None
        return ChosenDevice(reason=f"no GPU is used: {late}", is_odd=True)
