"""What a user would pick instead of p2ptrain, run on the same devices.

Torch is loaded, models are built and traced with a whole core a device; from then on each device
has its share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from tools.bench.alone import AloneSpeed, fastest
from tools.bench.cells import Cell, Rounds
from tools.bench.processes import Company, MemoryWatch, Process, Reading
from tools.testbed import EmulatedDevice, Testbed

_MICRO_BATCHES = (16, 8, 32)
"""Micro-batches a round that torch pipelining is tried with."""
_BUCKETS_MB = (1.0, 4.0, 25.0)
_DEFAULT_BUCKET_MB = 25.0
"""Of DistributedDataParallel: what is tried, and what it does by itself."""
_ROUNDING = 1e-9


class Rivals:
    """Runs rivals in a household whose devices' own speeds are known.

    Args:
        alone: of this model, by device.
        blocks: (name, seconds) of the model's blocks, for cutting it.
        chosen: which of the settings was the best in an earlier run of this cell; None: try them.
    """

    def __init__(
        self,
        testbed: Testbed,
        alone: Mapping[str, AloneSpeed],
        blocks: Sequence[tuple[str, float]],
        limit_seconds: float,
        chosen: int | None = None,
    ) -> None:
        self._testbed = testbed
        self._alone = alone
        self._blocks = blocks
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
            "losses": _losses(cell, [m["losses"] for m in measured]),
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
        own = self._stages(cell) if cell.system == "torch-pp" else self._replicas(cell)
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

    def _stages(self, cell: Cell) -> list[dict[str, Any]]:
        speeds = [device.cores for device in self._testbed.devices]
        cuts = balanced_cuts([seconds for _, seconds in self._blocks], speeds)
        sizes = [
            cell.batch_size // count
            for count in _MICRO_BATCHES
            if count >= len(speeds) and cell.batch_size % count == 0
        ]
        if self._chosen is not None:
            sizes = [sizes[self._chosen]]
        task = {"cuts": [self._blocks[cut][0] for cut in cuts], "micro_batches": sizes}
        return [task] * len(speeds)

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
        if cell.system == "torch-pp":
            sizes = tasks[0]["micro_batches"]
            return {"cuts": tasks[0]["cuts"], "micro_batch": sizes[chosen], "tried": sizes, **tries}
        settings = [task["settings"] for task in tasks]
        return {
            "shares": [task["end_sample"] - task["first_sample"] for task in tasks],
            "micro_batches": [own[chosen]["micro_batch"] for own in settings],
            "bucket_mb": settings[0][chosen]["bucket_mb"],
            "tried": settings[0],
            **tries,
        }


def measure_blocks(cell: Cell, testbed: Testbed, limit_seconds: float) -> list[list[Any]]:
    """Name and seconds of each block, on the fastest device with a whole core.

    Of as many samples as a micro-batch may have: blocks do not all gain alike from larger ones.
    """
    company = Company(limit_seconds)
    device = fastest(testbed.devices)
    device.lift()
    task = {"model": cell.model, "samples": cell.batch_size // _MICRO_BATCHES[0]}
    worker = company.start(device, "-m", "tools.bench.worker", "blocks", json.dumps(task))
    company.expect_each([worker], "ready")
    worker.tell(go=True)
    (measured,) = company.expect_each([worker], "measured")
    device.limit()
    blocks: list[list[Any]] = measured["blocks"]
    return blocks


def _measure(
    company: Company, workers: Sequence[Process], devices: Sequence[EmulatedDevice]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    for worker in workers:
        worker.tell(go=True)
    company.expect_each(workers, "steady")
    begin = Reading.now(devices)
    measured = company.expect_each(workers, "measured")
    return measured, begin.until(Reading.now(devices))


def _losses(cell: Cell, parts: Sequence[Sequence[float]]) -> list[float]:
    """Of each round, from what each device reports."""
    if cell.system == "torch-pp":
        return list(parts[-1])
    return [sum(losses) for losses in zip(*parts, strict=True)]


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


def balanced_cuts(seconds: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Where to cut a chain of blocks so that the slowest device's time is least.

    Of all such cuts those whose stages are most even (least sum of squares): one heavy block sets
    the slowest time, and leaves the other stages free to differ; but blocks' times are not exact,
    and the second slowest stage may prove to be the slowest.

    Args:
        seconds: of each block, on one and the same device.
        speeds: of the devices, in the order of their stages.

    Returns:
        The first block of each stage but the first; every device gets at least one block.

    Raises:
        ValueError: fewer blocks than devices.
    """
    blocks, devices = len(seconds), len(speeds)
    if blocks < devices:
        raise ValueError(f"{blocks} blocks cannot be cut into {devices} stages")
    until = [0.0]
    for block in seconds:
        until.append(until[-1] + block)
    slowest, _ = _best_cuts(until, speeds, max)
    most = slowest * (1 + _ROUNDING)

    def unevenness(so_far: float, stage: float) -> float:
        return so_far + stage * stage if stage <= most else inf

    return _best_cuts(until, speeds, unevenness)[1]


def _best_cuts(
    until: Sequence[float], speeds: Sequence[float], cost: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least cost of all cuts, and these; `cost` adds a stage's seconds to a cost so far."""
    # best[end] = (cost, cuts) of blocks [0, end) on the devices so far
    best: dict[int, tuple[float, list[int]]] = {
        end: (cost(0.0, until[end] / speeds[0]), []) for end in range(1, len(until))
    }
    for speed in speeds[1:]:
        best = {
            end: min(
                (cost(so_far, (until[end] - until[first]) / speed), [*cuts, first])
                for first, (so_far, cuts) in best.items()
                if first < end
            )
            for end in range(min(best) + 1, len(until))
        }
    return best[len(until) - 1]
