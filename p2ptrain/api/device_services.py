"""What a member computes on, and everything that it does for training: loaded once torch is.

The device is chosen before it joins. A check of an accelerator takes seconds, so its outcome is
kept in the state folder, by the accelerator, its driver and torch's build; with another one of
these it is checked again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from p2ptrain import events
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.coordinator.service import CoordinatorService
from p2ptrain.devices.check import METHOD, CheckReport, check_device
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.devices.request import AUTO, HOST_NAME, DeviceRequest
from p2ptrain.devices.selection import ChosenDevice, DeviceChooser
from p2ptrain.errors import AcceleratorFailed, DeviceUnusable, OptionError, UserError
from p2ptrain.events import Event
from p2ptrain.holder.rounds.pause import JobPause
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.logs import get_logger
from p2ptrain.manners.condition import MemoryInUse
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.calls import MessageRoute
from p2ptrain.process.box import Box
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.host_process import MemoryCeiling, use_threads
from p2ptrain.profiling.fitness import misfit
from p2ptrain.profiling.profile_cache import ProfileCache
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.worker.device_profile import DeviceProfiler
from p2ptrain.worker.service import WorkerService

log = get_logger(__name__)

if TYPE_CHECKING:
    from p2ptrain.holder.trainer import JobTrainer


class DeviceServices:
    """The compute thread and the services of one device.

    Args:
        profiles: what was measured before; its folder may be shared with other runs.
        jobs: where this device's own jobs are written down, or None: nowhere.
        memory_bytes: as `JobMemory`.
        threads: torch's threads, or None: torch's choice.
        only_for: names of the devices for whose jobs alone this one computes; empty: for all.
        emit: called when a job that this device has a part in stands still, or cannot let it go.
        box: where models of others are measured; None: in the thread that computes.
        device: what it computes on.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        profiles: ProfileCache | None = None,
        jobs: StateFolder | None = None,
        memory_bytes: int | None = None,
        threads: int | None = None,
        only_for: Collection[str] = (),
        emit: Callable[[Event], None] | None = None,
        box: Box | None = None,
        device: ComputeDevice = HOST,
    ) -> None:
        if threads is not None:
            use_threads(threads)
        self._emit = emit
        self._trainer: JobTrainer | None = None  # of the job that it trains
        ceiling = MemoryCeiling()
        self.compute = ComputeThread(after=ceiling.look, device=device, lost=self._lost)
        cache = profiles or ProfileCache(None)
        measures = DeviceProfiler(
            mesh, self.compute, cache, memory_bytes, ceiling, box, emit, misfit
        )
        self.service = WorkerService(mesh, self.compute, measures, emit, only_for, jobs)
        self._coordinator = CoordinatorService(mesh, self.service.due)

    @property
    def routes(self) -> Mapping[str, MessageRoute]:
        """What this device answers, by kind."""
        return {**self.service.routes, **self._coordinator.routes}

    @property
    def waits(self) -> str | None:
        """What the job of this device waits for that is no device: see `JobTrainer`."""
        return None if self._trainer is None else self._trainer.waits

    @property
    def limit(self) -> str:
        """What limits the job of this device now, in a sentence; "" where it is not known."""
        return "" if self._trainer is None else self._trainer.limit

    @property
    def energy(self) -> str:
        """What the job of this device has used of energy, in a sentence; "" before it is known."""
        return "" if self._trainer is None else self._trainer.energy

    @property
    def is_training(self) -> bool:
        """Whether it trains a job of its own."""
        return self._trainer is not None

    def memory_in_use(self) -> MemoryInUse:
        """Of this device, by jobs; takes a moment, and is called in a thread."""
        try:
            return self.service.measures.memory.in_use()
        except AcceleratorFailed as error:  # what computes on it says so to the user
            log.info("memory_not_known", why=str(error))
            return MemoryInUse()

    async def train(
        self,
        job: Job,
        options: TrainOptions,
        emit: Callable[[Event], None],
        folder: StateFolder | None = None,
        settings: RecoverySettings = HOME,
        pause: JobPause | None = None,
    ) -> None:
        """Train a job of this device, which may have no part in another device's job.

        Args:
            folder: where the job's journal stands; None: this job ends with its process.

        Raises:
            OptionError: this device has such a part.
            Error: as `JobTrainer.run`.
        """
        from p2ptrain.holder.trainer import JobTrainer  # members that only help never load it

        holder = self.service.slot.holder_name
        if holder is not None:
            raise OptionError(
                f"this device is computing for {holder}'s training: wait until that ends"
            )
        trainer = JobTrainer(self.service.device, job, options, emit, folder, settings, pause)
        self._trainer = trainer
        try:
            await trainer.run()
        finally:
            self._trainer = None
            await self.service.slot.drop(trainer.job_id)

    async def hand_over(self, seconds: float) -> None:
        """Have the others take over what this device does for them, for so long at most."""

        def warn(message: str) -> None:
            if self._emit is not None:
                self._emit(events.Warning(message))

        await self.service.slot.hand_over(seconds, warn)

    def _lost(self, device: ComputeDevice, failed: AcceleratorFailed) -> None:
        if self._emit is not None:
            text = f"{device.title}: {failed}; this device computes on its CPU from now on"
            self._emit(events.Warning(text))

    async def close(self) -> None:
        """Drop any job and end the compute thread."""
        await self.service.close()
        await self.compute.close()


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
