"""A device's profile of the model's units, as p2ptrain itself measures them before it plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2ptrain.net.write_form import write_form
from tools.bench import models
from tools.bench.cells import BATCH_SIZES
from tools.bench.worker.channel import Channel

SIZES = (2, 8, 32, 64)
BUDGET_SECONDS = 40.0


def run(task: Mapping[str, Any], channel: Channel) -> None:
    """Says the profile (`p2ptrain.profile/1`) and the device's overheads."""
    from p2ptrain.cli.script import load_job
    from p2ptrain.holder.start.prepare import prepare
    from p2ptrain.job.train_options import TrainOptions
    from p2ptrain.profiling.measure_units import measure_units
    from p2ptrain.profiling.overhead_yardsticks import measure_overheads

    job = load_job(str(models.script(task["model"])), [])
    prepared = prepare(job, TrainOptions(local=True))
    channel.ready()
    measured = measure_units(
        prepared.captured.description,
        batch_sizes=[size for size in SIZES if size <= BATCH_SIZES[task["model"]]["S"]],
        budget_seconds=BUDGET_SECONDS,
    )
    profile = {
        "units": write_form(measured)["units"],
        "times": write_form(measured)["times"],
        "format": "p2ptrain.profile/1",
        "model": task["model"],
        "input_bytes": prepared.input_bytes,
        "target_bytes": prepared.target_bytes,
        "optimizer_state_ratio": prepared.optimizer_state_ratio,
    }
    channel.say("measured", profile=profile, overheads=write_form(measure_overheads()))
