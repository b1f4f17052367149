"""p2ptrain itself: `join` on every device but the holder, `train` there, by the real commands.

Devices load torch with a whole core each; they are held to their shares before anything is
profiled, planned or trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import models
from tools.bench.cells import Cell, Rounds
from tools.bench.processes import CellError, Company, MemoryWatch, Process, Reading
from tools.testbed import EmulatedDevice, Testbed

CODE = "24681357"
END_SECONDS = 30.0
_MILESTONES = ("ready", "plan", "step")
"""Of the holder: how long a user waits for them is kept."""


class HouseholdRuns:
    """Runs p2ptrain in a household; the first device holds the data.

    Args:
        folder: for the devices' states: profiles are measured once a folder.
        train_options: more of them for `p2ptrain train`.
    """

    def __init__(
        self,
        testbed: Testbed,
        folder: Path,
        limit_seconds: float,
        train_options: Sequence[str] = (),
    ) -> None:
        self._testbed = testbed
        self._folder = folder
        self._limit_seconds = limit_seconds
        self._train_options = train_options

    def run(self, cell: Cell, rounds: Rounds) -> dict[str, Any]:
        """One run of a planner's cell. Raises CellError."""
        devices = self._testbed.devices
        company = Company(self._limit_seconds)
        starts = [(devices[0], self._train(cell, rounds))]
        starts += [(device, self._join(device)) for device in devices[1:]]
        with MemoryWatch(devices) as memory:
            holder, *_ = company.start_lifted(starts)
            begin, end = _watch(company, holder, devices, rounds)
            code = holder.exit_code(END_SECONDS + company.seconds_left)
            if code != 0:
                raise CellError(f"train ended with exit code {code}: {holder.story()}")
        return {
            **_figures(cell, rounds, holder.said),
            "train_options": list(self._train_options),
            "first_seconds": {kind: holder.first_seconds[kind] for kind in _MILESTONES},
            "spent": begin.until(end),
            "peak_anonymous_bytes": memory.peak_bytes,
        }

    def _train(self, cell: Cell, rounds: Rounds) -> Sequence[str]:
        holder = self._testbed.devices[0]
        return (
            *("-m", "p2ptrain", "train", models.SCRIPT),
            *("-o", f"model={cell.model}", "-o", f"batch_size={cell.batch_size}"),
            *("--planner", cell.system, "--steps", str(rounds.total), "--fresh"),
            *("--wait-for", str(len(self._testbed.devices))),
            *self._train_options,
            *self._common(holder),
        )

    def _join(self, device: EmulatedDevice) -> Sequence[str]:
        return ("-m", "p2ptrain", "join", *self._common(device))

    def _common(self, device: EmulatedDevice) -> Sequence[str]:
        state = self._folder / device.name
        own = ("--name", device.name, "--state-dir", str(state), "--threads", "1")
        return (*own, "--code", CODE, "--json")


def _watch(
    company: Company, holder: Process, devices: Sequence[EmulatedDevice], rounds: Rounds
) -> tuple[Reading, Reading]:
    """The counters when the last warm step and when the last step is done. Raises CellError."""
    begin: Reading | None = None
    while True:
        said = company.next()
        if said.process is not holder:
            if said.event is None:
                raise CellError(f"{said.process.device.name} ended: {said.process.story()}")
            continue
        if said.event is None:
            raise CellError(f"train ended: {holder.story()}")
        if not said.is_a("step"):
            continue
        if said.event["step"] == rounds.warm:
            begin = Reading.now(devices)
        if said.event["step"] == rounds.total and begin is not None:
            return begin, Reading.now(devices)


def _figures(cell: Cell, rounds: Rounds, said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """From the holder's events."""
    steps = [event for event in said if event["event"] == "step"]
    plans = [event for event in said if event["event"] == "plan"]
    plan = plans[-1]
    seconds = [step["seconds"] for step in steps[rounds.warm :]]
    return {
        "samples_per_s": cell.batch_size * len(seconds) / sum(seconds),
        "round_seconds": seconds,
        "losses": [step["loss"] for step in steps],
        "warm_rounds": rounds.warm,
        "predicted_samples_per_s": plan["predicted_samples_per_s"],
        "plan": _plan(plan),
        "plan_reasons": [event["reason"] for event in plans],
        "warnings": [event["message"] for event in said if event["event"] == "warning"],
    }


def _plan(event: dict[str, Any]) -> dict[str, Any]:
    """Without the names of the parameters."""
    return {
        "micro_batch": event["micro_batch"],
        "micro_batches": event["micro_batches"],
        "stages": [
            {key: value for key, value in stage.items() if key != "parameters"}
            for stage in event["stages"]
        ],
        "left_out": event["left_out"],
    }
