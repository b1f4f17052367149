"""A device's profile of a model: measured once, then kept by the model's digest.

The file holds what was measured with which number of threads, or with which kind of accelerator;
with another the device measures again. `processor_kind` is the same on devices of one kind.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.devices.request import MACHINE_VARIABLE
from p2ptrain.errors import TooLarge, TrainingError, UserError, size_text
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.net.forms import write_form
from p2ptrain.process.box import Box, BoxTask
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.profiling.boxed_measure import (
    ANSWER_LIMIT_BYTES,
    MEASURE,
    ProfileRequest,
    ProfileResult,
)
from p2ptrain.profiling.measure_units import ONEDNN_FROM, UnitMeasurements, measure_units
from p2ptrain.profiling.overhead_yardsticks import YARDSTICK_SECONDS, measure_overheads

log = get_logger(__name__)

METHOD = 15
"""The version of the method: what an earlier one has found is measured again."""

OVERHEAD_BYTES = 256 << 20
"""Address space, not memory, of the box's threads and heaps, beside what a model is measured with.
The kernel ends the box first where memory itself is short."""

MAX_SAMPLES = 128
"""A sample of a larger batch costs about the same, and a slow device would take seconds."""

MAX_ACCELERATOR_SAMPLES = 4096
"""The same of an accelerator, which a larger batch keeps busy."""

MAX_SECONDS = 7.0
"""A sample of MobileNetV2 takes three times as long in a batch of 4 as in one of 64."""

BOX_SECONDS = 35.0
"""Another device's model may compute this long; a coordinator waits longer than that."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How long a device measures a model.

    Attributes:
        budget_seconds: for all sizes, passes repeated where there is time.
        most_seconds: what a slow device may take instead, for larger sizes.
        enough_seconds: of those, what it may take for more than a second size: all wait for
            the slowest device, and have waited for the model before.
        yardstick_seconds: processor time of each yardstick of the overheads.
    """

    budget_seconds: float = 2.0
    most_seconds: float = MAX_SECONDS
    enough_seconds: float = 6.0
    yardstick_seconds: float = YARDSTICK_SECONDS


def batch_sizes_to_measure(
    batch_size: int,
    micro_batch: int,
    devices: int = 1,
    least: int = 1,
    *,
    divided: bool = True,
) -> list[int]:
    """Which numbers of samples to time.

    Up to a device's part of the mini-batch, in equal steps: powers of two, so that a device more or
    less changes them seldom. The largest is no smaller than torch needs to be fast, if there are as
    many samples (`measure_units.py`). Of a fixed micro-batch a quarter too, as a device of a group
    may get; where none may, what remains of the mini-batch: others occur nowhere, or do not
    compute. From a quarter of that part on, at most 4: what one sample takes follows from what
    more take, and not the other way round.

    Args:
        batch_size: of the job.
        micro_batch: fixed, or 0.
        devices: that may take part.
        least: samples that the model can train on.
        divided: whether a plan may divide a micro-batch between devices.
    """
    if micro_batch and not divided:
        return sorted({batch_size % micro_batch or micro_batch, micro_batch})
    if micro_batch:
        return sorted({max(least, -(-micro_batch // 4)), micro_batch})
    top = min(MAX_SAMPLES, batch_size, max(4, _power_of_two(batch_size / devices)))
    low = max(1, min(4, top // 4))
    middle = _power_of_two(math.sqrt(top * low))
    top = min(max(top, ONEDNN_FROM), batch_size)
    return sorted({min(max(size, least), batch_size) for size in (low, middle, top)})


def accelerator_sizes(batch_sizes: Sequence[int], most: int) -> list[int]:
    """What an accelerator measures where it is asked for `batch_sizes`: powers of two between, too.

    Its time hardly grows with the batch until all of it is busy, so no line through few sizes says
    where that ends.

    Args:
        most: samples that a micro-batch may have; the sizes asked for where they are all there are.
    """
    low, top = min(batch_sizes), max(*batch_sizes, min(most, MAX_ACCELERATOR_SAMPLES))
    powers = [1 << power for power in range(top.bit_length()) if low < 1 << power < top]
    return sorted({low, *powers, top}) if most else sorted({*batch_sizes})


def _power_of_two(number: float) -> int:
    """The nearest, at least 1."""
    return int(2 ** max(0, round(math.log2(number))))


class ProfileCache:
    """Measured profiles, in memory and in a folder of this device's state.

    Attributes:
        measuring: how those are measured that are not there yet.
    """

    def __init__(self, folder: Path | None, measuring: Measuring | None = None) -> None:
        self.measuring = measuring or Measuring()
        self._folder = None if folder is None else StateFolder(folder)
        self._known: dict[str, Mapping[str, Any]] = {}

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The profile kept under `key`, if it is there and whole."""
        if key not in self._known and self._folder is not None:
            try:
                found = self._folder.read_json(f"{key}.json")
            except UserError as error:
                log.warning("profile_unreadable", why=str(error))  # it is measured again
                return None
            if isinstance(found, dict):
                self._known[key] = found
        return self._known.get(key)

    def put(self, key: str, measured: Mapping[str, Any]) -> None:
        """Keep a profile; a cache that cannot be written only costs time later."""
        self._known[key] = measured
        if self._folder is None:
            return
        try:
            self._folder.write_json(f"{key}.json", dict(measured))
        except (OSError, UserError) as error:
            log.warning("profile_not_kept", why=str(error))


async def measure(
    description: ModelDescription,
    batch_sizes: Sequence[int],
    compute: ComputeThread,
    cache: ProfileCache,
    memory_bytes: int,
    *,
    largest_second: bool = False,
) -> Mapping[str, Any]:
    """The profile of `description` on this device; see `measure_units` for its content.

    Beside it "overheads": what the device spends on messages and updates (`plan/types/cluster.py`),
    "wall_by_cpu": wall seconds for one of processor time, in all these times, "cold": batch sizes
    whose times are of a first pass, "faster": from how many samples on which units cost less at
    once (`measure_units.py`), and "processor": its kind. It takes at most about `memory_bytes`,
    whatever the model's size.

    Raises:
        TooLarge: of an accelerator, it does not fit there.
    """
    device = compute.device
    key = _key(description.digest, batch_sizes, device)
    known = cache.get(key)
    if known is not None and is_complete(known):
        if not device.is_host and not has_room(known, memory_bytes):
            raise TooLarge(f"{size_text(memory_bytes)} of its memory are left")
        return known

    limits = cache.measuring

    def measured() -> dict[str, Any]:
        units = measure_units(
            description,
            batch_sizes=batch_sizes,
            budget_seconds=limits.budget_seconds,
            most_seconds=limits.most_seconds,
            enough_seconds=limits.enough_seconds,
            largest_second=largest_second and device.is_host,
            memory_bytes=memory_bytes,
            device=device,
        )
        return _profile(units, limits, device)

    return await _kept(cache, key, await compute.run((1,), measured))


async def measure_boxed(
    model: bytes,
    digest: str,
    batch_sizes: Sequence[int],
    compute: ComputeThread,
    cache: ProfileCache,
    memory_bytes: int,
    box: Box,
    *,
    largest_second: bool = False,
    briefly: bool = False,
) -> Mapping[str, Any]:
    """As `measure`, of a model of others: its units run in the box, and nothing of it here.

    They run on the processor, whatever this device computes with.

    Args:
        model: of `ModelDescription.to_bytes`; `digest` is its SHA-256.
        briefly: each is run once, to see that it can be.

    Raises:
        TrainingError: the model itself fails, as it does in plain torch, or is refused.
        Ended: it has ended the process that measured it.
        NoBox: there is none.
    """
    key = _key(digest, batch_sizes, HOST)
    known = cache.get(key)
    if known is not None and is_complete(known):
        return known
    limits = replace(cache.measuring, budget_seconds=0.0) if briefly else cache.measuring
    asked = ProfileRequest(
        *(model, tuple(batch_sizes), memory_bytes, torch.get_num_threads()),
        *(limits.budget_seconds, limits.most_seconds, limits.enough_seconds, largest_second),
    )
    found = ProfileResult.from_bytes(
        await box.ask(
            BoxTask(
                MEASURE,
                asked.to_bytes(),
                memory_bytes + OVERHEAD_BYTES,
                BOX_SECONDS,
                ANSWER_LIMIT_BYTES,
            )
        )
    )
    units = found.found
    if units is None:
        raise TrainingError(found.fails)
    measured = await compute.run((1,), lambda: _profile(units, limits, HOST))
    return await _kept(cache, key, measured)


def _key(digest: str, batch_sizes: Sequence[int], device: ComputeDevice) -> str:
    sizes = "-".join(str(size) for size in batch_sizes)
    computes = str(torch.get_num_threads())
    if not device.is_host:
        computes = hashlib.sha256(device.kind.encode()).hexdigest()[:16]
    if MACHINE_VARIABLE in os.environ:  # others here take of the cores: measured while they do
        computes += "-shared"
    return f"{digest[:32]}-{computes}-{sizes}"


async def _kept(cache: ProfileCache, key: str, measured: Mapping[str, Any]) -> Mapping[str, Any]:
    await asyncio.to_thread(cache.put, key, measured)
    return measured


def at_share(measured: Mapping[str, Any], share: float) -> Mapping[str, Any]:
    """A profile as of a device that computes for a `share` of the time, above 0."""
    if share >= 1 or not measured:
        return measured
    times = {
        size: {part: [one / share for one in seconds] for part, seconds in parts.items()}
        for size, parts in measured["times"].items()
    }
    return {**measured, "times": times, "wall_by_cpu": measured["wall_by_cpu"] / share}


def has_room(measured: Mapping[str, Any], memory_bytes: int) -> bool:
    """Whether the largest unit fits there, as when it was measured, with the fewest samples."""
    size = min(map(int, measured.get("times", ())), default=0)
    needed = (
        unit["parameter_bytes"]
        + unit["trainable_bytes"]
        + size * (unit["activation_bytes"] + (unit.get("passing_bytes") or 0))
        for unit in measured.get("units", ())
    )
    return max(needed, default=0) <= memory_bytes


def is_complete(measured: Mapping[str, Any]) -> bool:
    """Earlier versions timed units of small batches only, or less."""
    return measured.get("method") == METHOD


def _profile(units: UnitMeasurements, limits: Measuring, device: ComputeDevice) -> dict[str, Any]:
    """With what this device spends beside units, in the calling thread."""
    overheads = measure_overheads(limits.yardstick_seconds, device=device)
    return {
        **write_form(units),
        "method": METHOD,
        "processor": processor_kind() if device.is_host else device.kind,
        "faster": {"from": ONEDNN_FROM, "units": list(units.faster)} if units.faster else None,
        "overheads": write_form(overheads.times_slowdown(units.wall_by_cpu)),
    }


_CPUINFO = Path("/proc/cpuinfo")

_IDENTIFYING_KEYS = frozenset(
    ("model name", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
)
"""The first three on x86, the others on ARM; a chip of several kinds of cores lists all."""

MAX_LETTERS = 200


def _instructions() -> str:
    """Which instructions torch's kernels use here: or fewer, if so configured."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    used = torch.backends.cpu.get_cpu_capability()
    return used if limit is None else f"{used} (oneDNN: {limit[:16]})"


def processor_kind(cpuinfo: Path = _CPUINFO) -> str:
    """With what else decides how much processor time a model takes: torch and its threads.

    Returns:
        "" where the system does not say: macOS and Windows name families of very unlike chips.
    """
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    identity = {
        f"{name.strip()} {value.strip()}"
        for name, _, value in pairs
        if name.strip() in _IDENTIFYING_KEYS
    }
    if not identity:
        return ""
    software = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {_instructions()}"
    return f"{software}, {platform.machine()}, {', '.join(sorted(identity))}"[:MAX_LETTERS]
