"""What a user would pick instead of p2ptrain, run on the same devices.

Torch is loaded, models are built and traced with a whole core a device; from then on each device
has its share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.alone import AloneSpeed, fastest
from tools.bench.cells import Cell, Rounds
from tools.bench.processes import Company, MemoryWatch, Process, Reading
from tools.testbed import EmulatedDevice, Testbed

_BUCKETS_MB = (1.0, 4.0, 25.0)
_DEFAULT_BUCKET_MB = 25.0
"""Of DistributedDataParallel: what is tried, and what it does by itself."""


class Rivals:
    """Runs rivals in a household whose devices' own speeds are known.

    Args:
        alone: of this model, by device.
        chosen: which of the settings was the best in an earlier run of this cell; None: try them.
    """

    def __init__(
        self,
        testbed: Testbed,
        alone: Mapping[str, AloneSpeed],
        limit_seconds: float,
        chosen: int | None = None,
    ) -> None:
        self._testbed = testbed
        self._alone = alone
        self._limit_seconds = limit_seconds
        self._chosen = chosen

    def run(self, cell: Cell, rounds: Rounds) -> dict[str, Any]:
        """One run of a rival's cell. Raises CellError."""
        company = Company(self._limit_seconds)
        tasks = self._tasks(cell, rounds)
        starts = [
            (device, ("-m", "tools.bench.worker", cell.system, json.dumps(task)))
            for device, task in tasks
        ]
        devices = [device for device, _ in tasks]
        with MemoryWatch(devices) as memory:
            workers = company.start_lifted(starts)
            measured, spent = _measure(company, workers, devices)
        seconds = [max(times) for times in zip(*(m["seconds"] for m in measured), strict=True)]
        return {
            "samples_per_s": cell.batch_size * len(seconds) / sum(seconds),
            "round_seconds": seconds,
            "losses": [sum(parts) for parts in zip(*(m["losses"] for m in measured), strict=True)],
            "warm_rounds": rounds.warm,
            "setup": self._setup(cell, [task for _, task in tasks], measured[-1]),
            "spent": spent,
            "peak_anonymous_bytes": memory.peak_bytes,
        }

    def _tasks(self, cell: Cell, rounds: Rounds) -> list[tuple[EmulatedDevice, dict[str, Any]]]:
        common = {
            "model": cell.model,
            "batch_size": cell.batch_size,
            "warm": rounds.warm,
            "steady": rounds.steady,
        }
        if cell.system == "torch":
            device = fastest(self._testbed.devices)
            best = self._alone[device.name].micro_batch
            return [(device, {**common, "micro_batch": best})]
        own = self._replicas(cell)
        devices = self._testbed.devices
        places = [
            {
                "rank": rank,
                "world": len(devices),
                "address": device.address,
                "first_address": devices[0].address,
            }
            for rank, device in enumerate(devices)
        ]
        return [
            (device, {**common, **place, **task})
            for device, place, task in zip(devices, places, own, strict=True)
        ]

    def _replicas(self, cell: Cell) -> list[dict[str, Any]]:
        devices = self._testbed.devices
        speeds = [self._alone[d.name].samples_per_s(cell.batch_size) for d in devices]
        tasks, first = [], 0
        for device, share in zip(devices, weighted_shares(cell.batch_size, speeds), strict=True):
            place = {"first_sample": first, "end_sample": first + share}
            settings = self._ddp_settings(cell, self._alone[device.name], share)
            tasks.append({**place, "settings": settings})
            first += share
        return tasks

    def _ddp_settings(self, cell: Cell, own: AloneSpeed, share: int) -> list[dict[str, Any]]:
        """In the order of trying; the same number of them on every device."""
        best = own.best_of_at_most(share)
        if cell.system == "ddp-default":
            return [{"micro_batch": best, "bucket_mb": _DEFAULT_BUCKET_MB}]
        whole = share if share <= max(own.seconds_by_size) else best
        pairs = [(size, bucket) for bucket in _BUCKETS_MB for size in (whole, best)]
        settings = [{"micro_batch": size, "bucket_mb": bucket} for size, bucket in pairs]
        return settings if self._chosen is None else [settings[self._chosen]]

    def _setup(
        self, cell: Cell, tasks: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        """How the rival was set up, for the report."""
        if cell.system == "torch":
            return {"micro_batch": tasks[0]["micro_batch"]}
        chosen: int = measured["chosen"]
        tries = {
            "chosen": chosen if self._chosen is None else self._chosen,
            "seconds_of_tries": measured["seconds_of_tries"],
        }
        settings = [task["settings"] for task in tasks]
        return {
            "shares": [task["end_sample"] - task["first_sample"] for task in tasks],
            "micro_batches": [own[chosen]["micro_batch"] for own in settings],
            "bucket_mb": settings[0][chosen]["bucket_mb"],
            "tried": settings[0],
            **tries,
        }


def _measure(
    company: Company, workers: Sequence[Process], devices: Sequence[EmulatedDevice]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    for worker in workers:
        worker.tell(go=True)
    company.expect_each(workers, "steady")
    begin = Reading.now(devices)
    measured = company.expect_each(workers, "measured")
    return measured, begin.until(Reading.now(devices))


def weighted_shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, as near to the weights as that allows.

    Each gets at least one while there is enough: DistributedDataParallel waits for all.

    Raises:
        ValueError: fewer than one each, or a weight that is not above 0.
    """
    if total < len(weights) or min(weights) <= 0:
        raise ValueError(f"{total} cannot be shared by the weights {list(weights)}")
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [max(1, int(part)) for part in exact]
    while sum(shares) != total:
        step = 1 if sum(shares) < total else -1
        movable = [i for i, share in enumerate(shares) if step > 0 or share > 1]
        most = max(movable, key=lambda i: step * (exact[i] - shares[i]))
        shares[most] += step
    return shares
