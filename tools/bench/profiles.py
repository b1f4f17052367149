"""Profile and cluster files of a model in a household, measured on the emulated devices."""

from __future__ import annotations

import json
from typing import Any

from tools.bench.cells import Place
from tools.bench.processes import Company
from tools.testbed import Testbed

DEFAULT_MEMORY_BYTES = 4 * 1024**3
MEMORY_PART = 0.75
"""What torch, Python and the system leave of a device's memory."""
DEFAULT_RATE_MBIT = 1000.0
WIRE_PART = 0.95
"""Payload by line rate: headers of Ethernet, IP, TCP and TLS."""
LATENCY_SECONDS = 0.0005


def measure(place: Place, testbed: Testbed, limit_seconds: float) -> dict[str, Any]:
    """All devices measure the model's units at the same time. Raises CellError."""
    company = Company(limit_seconds)
    task = json.dumps({"model": place.model})
    command = ("-m", "tools.bench.worker", "units", task)
    workers = company.start_lifted([(device, command) for device in testbed.devices])
    for worker in workers:
        worker.tell(go=True)
    measured = company.expect_each(workers, "measured")
    return {"profile": measured[0]["profile"], "cluster": _cluster(testbed, measured)}


def _cluster(testbed: Testbed, measured: list[dict[str, Any]]) -> dict[str, Any]:
    devices = [
        {
            "name": device.name,
            "memory_bytes": int(MEMORY_PART * (device.memory_bytes or DEFAULT_MEMORY_BYTES)),
            "times": figures["profile"]["times"],
            "overheads": figures["overheads"],
        }
        for device, figures in zip(testbed.devices, measured, strict=True)
    ]
    devices[0]["holder"] = True
    rates = {device.name: _bytes_per_s(device.rate_mbit) for device in testbed.devices}
    names = list(rates)
    links = [
        {
            "from": sender,
            "to": receiver,
            "bytes_per_s": min(rates[sender], rates[receiver]),
            "latency_s": LATENCY_SECONDS,
        }
        for sender in names
        for receiver in names
        if sender != receiver
    ]
    return {"format": "p2ptrain.cluster/1", "devices": devices, "links": links}


def _bytes_per_s(rate_mbit: float | None) -> float:
    return WIRE_PART * (rate_mbit or DEFAULT_RATE_MBIT) * 1e6 / 8
