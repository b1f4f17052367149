"""What p2ptrain's own simulator says of a cell: the limit to hold the measured figure against.

Twice: by the plain cost model (`plain`), and by what the runtime does (`overlap`: messages and
updates cost time, all-reduce overlaps backwards). The reference is the simulated devices' own sum,
from the same profiles, so that fractions do not depend on the hour at which they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2ptrain.errors import Error
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tools.bench.cells import Cell


def simulate(cell: Cell, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Both models' figures of a planner's cell; `error` where it has no plan."""
    profile = Profile.from_json(measured["profile"])
    cluster = Cluster.from_json(measured["cluster"])
    reference = aggregate(profile, cluster, cell.batch_size)
    return {
        "measured_at": measured["measured_at"],
        "aggregate": reference,
        "plain": _planned(cell, profile, cluster, overlap=False, reference=reference),
        "overlap": _planned(cell, profile, cluster, overlap=True, reference=reference),
    }


def aggregate(profile: Profile, cluster: Cluster, batch_size: int) -> float:
    """Samples/s of all devices alone, each with its best profiled micro-batch."""
    total = 0.0
    for device in cluster.devices:
        times = device.times or profile.times
        slowdown = 1.0 if device.times else device.slowdown
        best = max(
            size / sum(one.forward + one.backward)
            for size, one in zip(times.sizes, times.times, strict=True)
            if size <= batch_size
        )
        total += best / slowdown
    return total


def _planned(
    cell: Cell, profile: Profile, cluster: Cluster, *, overlap: bool, reference: float
) -> dict[str, Any]:
    request = PlanRequest(batch_size=cell.batch_size, planner=cell.system, overlap=overlap)
    try:
        plan = make_plan(profile, cluster, request)
    except Error as error:
        return {"error": str(error)}
    speed = plan.predicted.samples_per_s
    return {"samples_per_s": speed, "fraction": speed / reference, "plan": plan.to_json()}
