"""`p2ptrain profile`: what each unit of the script's model costs on this device."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain import events
from p2ptrain.cli import arguments
from p2ptrain.cli.output import Output
from p2ptrain.cli.script import load_job
from p2ptrain.cli.usage import DONE, Command, Options, check_folders
from p2ptrain.devices.request import CHOICES, HOST_NAME, read_request
from p2ptrain.job.planning_files import write_whole

if TYPE_CHECKING:
    from p2ptrain.devices.interface import ComputeDevice
    from p2ptrain.holder.start.prepared_job import PreparedJob
    from p2ptrain.job.job import Job
    from p2ptrain.plan.types.profile import Profile

DEFAULT_BATCH_SIZES = (1, 4, 16)

BUDGET_SECONDS = 30.0
"""For all batch sizes together, with passes repeated; but each is run once, however slow. Before
training a tenth of that must do; a file may be better."""

_DESCRIPTION = """\
Measures each layer of SCRIPT's model on this device: memory, operations, and the time of the
forward and the backward for each batch size. `p2ptrain plan` needs this file
(p2ptrain.profile/1)."""


def _options(own: Options) -> None:
    arguments.add_script_options(own)
    own.value("--out P.json", arguments.path, "write the profile here", required=True)
    own.value(
        "--batch-sizes N,N,...",
        arguments.whole_numbers,
        "numbers of samples to measure with (default: 1,4,16)",
        default=DEFAULT_BATCH_SIZES,
    )
    own.value(
        "--threads T",
        arguments.threads,
        "CPU threads to compute with (default: as many as torch chooses)",
    )
    own.value(
        f"--device {CHOICES}",
        arguments.one_device,
        "what to measure on (default: cpu)",
        default=HOST_NAME,
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Measure and write."""
    out: Path = args.out
    check_folders(out)
    place = out.absolute()  # the script may change the folder it runs in
    job = load_job(args.script, args.job_options)
    device = _device(args, output)
    profile = measured_profile(job, args.batch_sizes, args.threads, device)
    left_out = sorted(set(args.batch_sizes) - set(profile.times.sizes))
    if left_out:
        sizes = ", ".join(map(str, left_out))
        output.show(
            events.Warning(message=f"batch sizes {sizes} are too large for this device's memory")
        )
    write_whole(place, json.dumps(profile.to_json(), indent=1))
    units = len(profile.units)
    output.result(
        {"event": "profile", "out": str(out), "units": units, "sizes": list(profile.times.sizes)},
        f"measured {units} layers with {', '.join(map(str, profile.times.sizes))} samples: {out}",
    )
    return DONE


def _device(args: argparse.Namespace, output: Output) -> ComputeDevice | None:
    """What is measured on; None: the processor. Raises DeviceUnusable."""
    if args.device == HOST_NAME:
        return None
    from p2ptrain.api.device_services import CHECKS, choose_device

    folder = arguments.state_dir_of(args) / CHECKS
    choosing = choose_device(read_request(args.device), folder, output.show, threads=args.threads)
    found = asyncio.run(choosing).device
    return None if found.is_host else found


def measured_profile(
    job: Job,
    batch_sizes: Sequence[int],
    threads: int | None,
    device: ComputeDevice | None = None,
) -> Profile:
    """The profile of `job`'s model on this device. Raises what capturing the model raises.

    Args:
        device: an accelerator of it; None: its processor.
    """
    import torch

    from p2ptrain.devices.processor import HOST
    from p2ptrain.holder.start.prepare import prepare
    from p2ptrain.job.train_options import TrainOptions
    from p2ptrain.plan.types.profile import Profile
    from p2ptrain.process.host_process import keep_freed_memory
    from p2ptrain.process.memory_budget import usable_memory_bytes
    from p2ptrain.profiling.measure_units import measure_units
    from p2ptrain.worker.job_memory import ACCELERATOR_SHARE, device_budgets

    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    prepared = prepare(job, TrainOptions(local=True))
    memory_bytes = usable_memory_bytes()
    torch.set_flush_denormal(True)  # as in the thread that computes
    try:
        if device is not None:
            device.prepare_thread()
            memory_bytes = device_budgets(device, memory_bytes, ACCELERATOR_SHARE).compute_bytes
        measured = measure_units(
            prepared.captured.description,
            batch_sizes=batch_sizes,
            budget_seconds=BUDGET_SECONDS,
            every_size=True,
            memory_bytes=memory_bytes,
            device=device or HOST,
        )
    finally:
        torch.set_flush_denormal(False)
    profile = Profile(
        model=type(job.model).__name__,
        input_bytes=prepared.input_bytes,
        target_bytes=prepared.target_bytes,
        units=measured.units,
        optimizer_state_ratio=prepared.optimizer_state_ratio,
        times=measured.times,
    )
    return _with_windows(profile, prepared)


def _with_windows(profile: Profile, prepared: PreparedJob) -> Profile:
    """With how its first units can be cut into tiles, where they can."""
    from p2ptrain.runtime.tiled.tile_layout import tileable
    from p2ptrain.tiling.kernels.tileable_operators import NotTiled
    from p2ptrain.tiling.planning.profile_maps import with_windows

    try:
        return with_windows(profile, tileable(prepared.captured.description))
    except NotTiled:
        return profile


COMMAND = Command(
    "profile",
    run,
    "measure a script's model on this device",
    _DESCRIPTION,
    "  p2ptrain profile digits.py --out digits.json --batch-sizes 1,4,16",
    _options,
)
