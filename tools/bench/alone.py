"""What each device of a household reaches alone; its sum is the reference, `aggregate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.bench.cells import BATCH_SIZES, Place
from tools.bench.processes import Company
from tools.testbed import EmulatedDevice, Testbed


@dataclass(frozen=True, slots=True)
class AloneSpeed:
    """One device's, with its best micro-batch.

    Attributes:
        micro_batch: samples.
        piece_seconds: forward and backward of a micro-batch.
        update_seconds: of the weights.
        seconds_by_size: as tried in the search for the best micro-batch.
    """

    micro_batch: int
    piece_seconds: float
    update_seconds: float
    seconds_by_size: Mapping[str, float]

    def samples_per_s(self, batch_size: int) -> float:
        """Over whole rounds of `batch_size` samples."""
        pieces = batch_size / self.micro_batch
        return batch_size / (pieces * self.piece_seconds + self.update_seconds)

    def best_of_at_most(self, samples: int) -> int:
        """The best micro-batch that is no larger than `samples`, which is no less than 1."""
        sizes = {int(size): seconds for size, seconds in self.seconds_by_size.items()}
        fitting = [size for size in sizes if size <= samples]
        return min(fitting, key=lambda size: sizes[size] / size) if fitting else samples


def speeds(kept: Mapping[str, Any]) -> dict[str, AloneSpeed]:
    """By device, from the results' file."""
    return {
        name: AloneSpeed(
            figures["micro_batch"],
            figures["piece_seconds"],
            figures["update_seconds"],
            figures["seconds_by_size"],
        )
        for name, figures in kept["devices"].items()
    }


def aggregate(kept: Mapping[str, Any], batch_size: int) -> float:
    """Samples/s of all devices, each by itself: the limit without a network."""
    return sum(speed.samples_per_s(batch_size) for speed in speeds(kept).values())


def fastest(devices: list[EmulatedDevice]) -> EmulatedDevice:
    """The first of the fastest."""
    return max(devices, key=lambda device: device.cores)


def measure(place: Place, testbed: Testbed, limit_seconds: float) -> dict[str, Any]:
    """All devices at the same time. Raises CellError."""
    company = Company(limit_seconds)
    task = json.dumps({"model": place.model, "largest": BATCH_SIZES[place.model]["S"]})
    command = ("-m", "tools.bench.worker", "alone", task)
    workers = company.start_lifted([(device, command) for device in testbed.devices])
    for worker in workers:
        worker.tell(go=True)
    searched = company.expect_each(workers, "searched")
    for worker in workers:
        worker.tell(go=True)
    measured = company.expect_each(workers, "measured")
    for worker in workers:
        worker.tell(stop=True)
    return {
        "devices": {
            device.name: {
                "cores": device.cores,
                "micro_batch": figures["micro_batch"],
                "piece_seconds": figures["piece_seconds"],
                "update_seconds": figures["update_seconds"],
                "seconds_by_size": tried["seconds_by_size"],
            }
            for device, tried, figures in zip(testbed.devices, searched, measured, strict=True)
        }
    }
