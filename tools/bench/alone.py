"""What each device of a household reaches alone; its sum is the reference, `aggregate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
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
    seconds_by_size: Mapping[int, float]

    def samples_per_s(self, batch_size: int) -> float:
        """Over whole rounds of `batch_size` samples."""
        pieces = batch_size / self.micro_batch
        return batch_size / (pieces * self.piece_seconds + self.update_seconds)

    def best_of_at_most(self, samples: int) -> int:
        """The best micro-batch that is no larger than `samples`, which is no less than 1."""
        sizes = self.seconds_by_size
        fitting = [size for size in sizes if size <= samples]
        return min(fitting, key=lambda size: sizes[size] / size) if fitting else samples


def speeds(kept: Mapping[str, Any]) -> dict[str, AloneSpeed]:
    """By device, from the results' file; devices with the same share of a core are the same."""
    figures: dict[str, Any] = kept["devices"]
    classes: dict[float, list[dict[str, Any]]] = {}
    for own in figures.values():
        classes.setdefault(own["cores"], []).append(own)
    return {name: _mean_speed(classes[own["cores"]]) for name, own in figures.items()}


def _mean_speed(devices: Sequence[Mapping[str, Any]]) -> AloneSpeed:
    return AloneSpeed(
        micro_batch=devices[0]["micro_batch"],
        piece_seconds=fmean(device["piece_seconds"] for device in devices),
        update_seconds=fmean(device["update_seconds"] for device in devices),
        seconds_by_size=mean_seconds([device["seconds_by_size"] for device in devices]),
    )


def mean_seconds(tried: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """By micro-batch size, of those that all devices have tried."""
    common = set.intersection(*(set(sizes) for sizes in tried))
    return {int(size): fmean(sizes[size] for sizes in tried) for size in sorted(common, key=int)}


def best_size(tried: Sequence[Mapping[str, float]]) -> int:
    """The micro-batch with which these devices are fastest together."""
    seconds = mean_seconds(tried)
    return min(seconds, key=lambda size: seconds[size] / size)


def aggregate(kept: Mapping[str, Any], batch_size: int) -> float:
    """Samples/s of all devices, each by itself: the limit without a network."""
    return sum(speed.samples_per_s(batch_size) for speed in speeds(kept).values())


def fastest(devices: list[EmulatedDevice]) -> EmulatedDevice:
    """The first of the fastest."""
    return max(devices, key=lambda device: device.cores)


def measure(
    place: Place, testbed: Testbed, limit_seconds: float, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All devices at the same time.

    Args:
        before: an earlier measurement, whose search for the best micro-batch still holds.

    Raises:
        CellError: a device could not be measured.
    """
    company = Company(limit_seconds)
    starts = [(device, _command(place, device, before)) for device in testbed.devices]
    workers = company.start_lifted(starts)
    for worker in workers:
        worker.tell(go=True)
    searched = company.expect_each(workers, "searched")
    tried = {
        device.name: said["seconds_by_size"]
        for device, said in zip(testbed.devices, searched, strict=True)
    }
    sizes = {
        device.name: best_size([tried[d.name] for d in testbed.devices if d.cores == device.cores])
        for device in testbed.devices
    }
    for worker in workers:
        worker.tell(micro_batch=sizes[worker.device.name])
    measured = company.expect_each(workers, "measured")
    for worker in workers:
        worker.tell(stop=True)
    return {
        "devices": {
            device.name: {
                "cores": device.cores,
                "micro_batch": sizes[device.name],
                "piece_seconds": figures["piece_seconds"],
                "update_seconds": figures["update_seconds"],
                "seconds_by_size": tried[device.name],
            }
            for device, figures in zip(testbed.devices, measured, strict=True)
        }
    }


def _command(
    place: Place, device: EmulatedDevice, before: Mapping[str, Any] | None
) -> Sequence[str]:
    known = before["devices"][device.name]["seconds_by_size"] if before else None
    largest = BATCH_SIZES[place.model]["S"]
    task = {
        "model": place.model,
        "largest": largest,
        "memory_bytes": device.memory_bytes,
        "seconds_by_size": known,
    }
    return ("-m", "tools.bench.worker", "alone", json.dumps(task))
