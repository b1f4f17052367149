"""Bytes on the wire for each step, beside the tensors that have to cross.

    python tools/wire_bytes.py --model mobilenet_v2 --devices 3

Several devices in this process, joined by real links (TLS over loopback), train a model of the test
zoo in a straight pipeline. What all links count between two steps (frames and headers included, TLS
records not) is compared with the sizes of the inputs, targets, activations and gradients that have
to cross between devices. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from p2ptrain.model.capture import capture  # noqa: E402
from p2ptrain.observe.events import Event, PlanEvent, Step  # noqa: E402
from p2ptrain.training.data import Samples  # noqa: E402
from p2ptrain.training.holder import HolderRun  # noqa: E402
from p2ptrain.training.job import SGD, Job  # noqa: E402
from p2ptrain.training.member import TrainingMember  # noqa: E402
from p2ptrain.training.options import TrainOptions  # noqa: E402
from tests import zoo  # noqa: E402
from tests.unit.mesh.household import Device, household  # noqa: E402

FIRST, LAST = 5, 25


async def measure(model: str, count: int, folder: Path) -> dict[str, object]:
    """Train, and read all counters when step FIRST and step LAST are reported."""
    made = zoo.make(model)
    sgd = SGD(lr=0.01, momentum=0.9)
    job = Job(made.model, made.data, made.loss, sgd, batch_size=16, micro_batch=4, epochs=100)
    totals: dict[int, tuple[int, int]] = {}
    plans: list[PlanEvent] = []
    async with household(folder) as home, AsyncExitStack() as stack:
        devices = [await home.start(f"device{number}") for number in range(count)]
        members = [_member(device) for device in devices]
        for member in members:
            stack.push_async_callback(member.close)
        for device in devices:
            await device.until(lambda d=device: len(d.alive()) == count)  # type: ignore[misc]

        def note(event: Event) -> None:
            if isinstance(event, PlanEvent):
                plans.append(event)
            if isinstance(event, Step) and event.step in (FIRST, LAST):
                totals[event.step] = _sent(devices)

        options = TrainOptions(wait_for=count, planner="pp", steps=LAST)
        await HolderRun(devices[0].mesh, members[0].service, job, options, note).run()
    steps = LAST - FIRST
    wire, sent = ((b - a) / steps for a, b in zip(totals[FIRST], totals[LAST], strict=True))
    tensors = _tensor_bytes(job, plans[0])
    return {
        "model": model,
        "devices": count,
        "tensor_bytes_per_step": tensors,
        "sent_tensor_bytes_per_step": round(sent),
        "wire_bytes_per_step": round(wire),
        "wire_to_tensors": round(wire / tensors, 4),
    }


def _member(device: Device) -> TrainingMember:
    member = TrainingMember(device.mesh)
    for kind, route in member.routes.items():
        device.mesh.route(kind, route.handler, route.parts)
    return member


def _sent(devices: list[Device]) -> tuple[int, int]:
    """(bytes on the wire, tensor bytes before compression) that all devices have sent."""
    counters = [
        device.mesh.link_statistics(other.mesh.self_id)
        for device in devices
        for other in devices
        if other is not device
    ]
    known = [counter for counter in counters if counter is not None]
    return sum(c.sent_bytes for c in known), sum(c.sent_parts_bytes for c in known)


def _tensor_bytes(job: Job, plan: PlanEvent) -> int:
    """What one step has to carry between devices, by the model's description."""
    example = Samples(job.data).collate([0, 1], "example")
    description = capture(job.model, job.loss, example, evaluation=False).description
    places = [(stage.units[0], stage.devices[0].name) for stage in plan.stages]
    total = 0
    for first, _ in places[1:]:
        for value in description.crossing(first, "train"):
            total += value.nbytes(job.batch_size) * (2 if value.may_require_grad else 1)
    if places[0][1] != "device0":
        total += sum(value.nbytes(job.batch_size) for value in description.inputs)
    if places[-1][1] != "device0":
        total += sum(value.nbytes(job.batch_size) for value in description.targets)
    return total


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=zoo.NAMES, default="mobilenet_v2")
    parser.add_argument("--devices", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.model, arguments.devices, Path(folder))
        print(json.dumps(asyncio.run(found), indent=1))


if __name__ == "__main__":
    main()
