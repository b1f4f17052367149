"""A cluster from a household's TOML file, as the testbed emulates it.

rate = "100mbit"          # of every cable, in each direction; the default of the devices below
latency = "1ms"

[[device]]                # the first device has the data
name = "laptop"
cores = 0.5               # of one core, which the profile is of
memory = "2GiB"           # left out: no limit

[[device]]
name = "pi"               # with a count: pi-1, pi-2, pi-3
count = 3
cores = 0.31
rate = "10mbit"           # this device's own
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, TypeAlias

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By, Length, Range
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.planning_file import Name

_RATES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}

_SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

MAX_DEVICES = 1000

UNLIMITED_BYTES_PER_S = 1.25e9
"""Of a cable without a rate: 10 Gbit/s."""

UNLIMITED_BYTES = 2**40
"""Of a device without a memory limit: more than any model of a household takes."""


def _quantity(units: Mapping[str, float], example: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)", text.strip().lower())
        if found is None or found[2] not in units:
            raise ValueError(f"expected a quantity such as {example}, found {text[:32]!r}")
        return float(found[1]) * units[found[2]]

    return read


Rate: TypeAlias = Annotated[float, By(_quantity(_RATES, "100mbit"), str, str)]

Size: TypeAlias = Annotated[float, By(_quantity(_SIZES, "2GiB"), str, str)]

Time: TypeAlias = Annotated[float, By(_quantity(_TIMES, "5ms"), str, str)]


@dataclass(frozen=True, slots=True)
class _Devices:
    name: Name
    cores: Annotated[float, Range(0.001, 1024.0)]
    count: Annotated[int, Range(1, MAX_DEVICES)] | None = None
    memory: Size | None = None
    rate: Rate | None = None
    latency: Time | None = None

    def __post_init__(self) -> None:
        if self.rate == 0:
            raise OptionError("rate: must be above zero")


@dataclass(frozen=True, slots=True)
class _HouseholdFile:
    device: Annotated[tuple[_Devices, ...], Length(MAX_DEVICES, 1)]
    memory: Size | None = None
    rate: Rate | None = None
    latency: Time | None = None


def cluster_of_household(value: object, where: str = "household") -> Cluster:
    """The cluster of a file's content. OptionError names the field that is missing or wrong."""
    file = read_form(_HouseholdFile, value, where, OptionError)
    if sum(kind.count or 1 for kind in file.device) > MAX_DEVICES:
        raise OptionError(f"{where}.device: at most {MAX_DEVICES} devices")
    devices: list[ClusterDevice] = []
    cables: dict[str, ClusterLink] = {}
    for kind in file.device:
        memory = _first(kind.memory, file.memory, UNLIMITED_BYTES)
        rate = _first(kind.rate, file.rate, UNLIMITED_BYTES_PER_S)
        latency = _first(kind.latency, file.latency, 0.0)
        names = [kind.name]
        if kind.count is not None:
            names = [f"{kind.name}-{number}" for number in range(1, kind.count + 1)]
        for name in names:
            is_first = not devices
            devices.append(ClusterDevice(name, int(memory), 1 / kind.cores, holder=is_first))
            cables[name] = ClusterLink(rate, latency)
    links = {
        (one, other): ClusterLink(
            min(cables[one].bytes_per_s, cables[other].bytes_per_s),
            max(cables[one].latency_s, cables[other].latency_s),
        )
        for one, other in permutations(cables, 2)
    }
    return Cluster(tuple(devices), links=links)


def _first(own: float | None, common: float | None, default: float) -> float:
    return next(value for value in (own, common, default) if value is not None)
