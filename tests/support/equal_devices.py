"""What PipeDream was measured on: equal devices, and a model with its parameters at the end."""

from __future__ import annotations

from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes

UNITS = 16
HEAVY_BYTES = 400_000_000


def vgg_like() -> Profile:
    """Convolutions that take all the time, then a unit with nearly all the parameters."""
    units = [Unit(f"conv{i}", 1_000_000, 400_000, 400_000, 0) for i in range(UNITS - 1)]
    units.append(Unit("fc", HEAVY_BYTES, 100_000, 40, 0))
    seconds = (*(0.01,) * (UNITS - 1), 0.001)
    times = TimeTable((1,), (UnitTimes(seconds, tuple(2 * each for each in seconds)),))
    return Profile("vgg-like", 0, 0, tuple(units), 1.0, times)


def equal(count: int) -> Cluster:
    devices = tuple(ClusterDevice(f"d{i:02}", 16 * 10**9, holder=i == 0) for i in range(count))
    return Cluster(devices, ClusterLink(1.25e9, 50e-6))
