"""Small profiles and clusters for the tests of this room, and random ones for properties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

from hypothesis import strategies as st

from p2ptrain.plan.cost.draft import StageGroup
from p2ptrain.plan.types.allocation import BatchSplit, deal, sample_ranges
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes

__all__ = ["BatchSplit", "Cluster", "ClusterDevice", "LeftOut"]

FREE = ClusterLink(bytes_per_s=1e300, latency_s=0.0)
PLENTY = 10**15

quick_request = partial(PlanRequest, effort=0.03)
"""Asks for a small part of the usual search, for tests of what plans of any search are."""


def table(forward: Sequence[float], backward: Sequence[float]) -> TimeTable:
    """Times of a batch of 1, so that a batch of n takes n times as long."""
    return TimeTable((1,), (UnitTimes(tuple(forward), tuple(backward)),))


def profile(
    times: Sequence[tuple[float, float]],
    output_bytes: int = 1,
    parameter_bytes: int = 0,
    activation_bytes: int = 0,
    input_bytes: int = 0,
    target_bytes: int = 0,
) -> Profile:
    """Units that differ in their times (forward, backward) for one sample only."""
    units = tuple(
        Unit(f"unit{i}", parameter_bytes, output_bytes, activation_bytes) for i in range(len(times))
    )
    forward, backward = zip(*times, strict=True)
    return Profile("test", input_bytes, target_bytes, units, 1.0, table(forward, backward))


def cluster(*names: str, link: ClusterLink = FREE, memory_bytes: int = PLENTY) -> Cluster:
    """Equal devices; the first one is the holder."""
    devices = tuple(ClusterDevice(name, memory_bytes, holder=name == names[0]) for name in names)
    return Cluster(devices, link)


def pieces(group: StageGroup, split: BatchSplit, place: int) -> list[int]:
    """Samples of every micro-batch that the device at `place` takes; 0 = has no part."""
    sizes = [split.samples(m) for m in range(split.micro_batches)]
    if len(group.devices) == 1:
        return sizes
    if group.deals:
        return [n * (owner == place) for n, owner in zip(sizes, deal(group.shares), strict=True)]
    return [end - first for n in sizes for first, end in [sample_ranges(group.shares, n)[place]]]


def straight_plan(
    split: BatchSplit, *stages: tuple[str, tuple[int, int], int], planner: str = "test"
) -> Plan:
    """Stages given as (device, units, warmup), nothing predicted."""
    return Plan(
        planner=planner,
        split=split,
        stages=tuple(
            PlannedStage(units, (DeviceShare(name, split.micro_batch),), warmup)
            for name, units, warmup in stages
        ),
        predicted=Predicted(0.0, 0.0, {}),
    )


# Sixteenths and powers of two: sums of times are exact, so that ties really are ties.
SIXTEENTHS = st.integers(0, 32).map(lambda n: n / 16)
RATES = st.sampled_from([16.0, 64.0, 256.0, 4096.0])
LATENCIES = st.sampled_from([0.0, 0.0625, 1.0])
LINKS = st.builds(ClusterLink, RATES, LATENCIES)


@st.composite
def _units(draw: st.DrawFn, name: str, least_bytes: int) -> Unit:
    """All of a unit's weights are trained, or some of them."""
    parameter_bytes = draw(st.integers(0, 64))
    return Unit(
        name,
        parameter_bytes,
        output_bytes=draw(st.integers(least_bytes, 64)),
        activation_bytes=draw(st.integers(0, 32)),
        trainable_bytes=draw(st.one_of(st.none(), st.integers(0, parameter_bytes))),
    )


@st.composite
def profiles(
    draw: st.DrawFn, most_units: int = 5, least_bytes: int = 0, least_units: int = 1
) -> Profile:
    """Profiles of up to `most_units` units with one or two measured sizes.

    Everything that travels has at least `least_bytes` bytes a sample.
    """
    count = draw(st.integers(least_units, most_units))
    units = tuple(draw(_units(f"unit{i}", least_bytes)) for i in range(count))
    per_unit = st.tuples(*[SIXTEENTHS.filter(bool)] * count)
    sizes = draw(st.sampled_from([(1,), (2,), (2, 4), (4, 8)]))
    times = tuple(UnitTimes(draw(per_unit), draw(per_unit)) for _ in sizes)
    return Profile(
        "random",
        input_bytes=draw(st.integers(least_bytes, 64)),
        target_bytes=draw(st.integers(least_bytes, 8)),
        units=units,
        optimizer_state_ratio=draw(st.sampled_from([0.0, 1.0, 2.0])),
        times=TimeTable(sizes, times),
    )


def heavier(profile: Profile, parameters: int, outputs: int) -> Profile:
    """The same units with so many times the parameter bytes and the output bytes."""
    units = tuple(
        replace(
            unit,
            parameter_bytes=unit.parameter_bytes * parameters,
            trainable_bytes=unit.trained_bytes * parameters,
            output_bytes=unit.output_bytes * outputs,
        )
        for unit in profile.units
    )
    return replace(profile, units=units)


@st.composite
def clusters(
    draw: st.DrawFn, most_devices: int = 3, tight: bool = True, least_devices: int = 1
) -> Cluster:
    """Clusters of up to `most_devices`, with `tight` some of little memory."""
    names = "abcdefgh"[: draw(st.integers(least_devices, most_devices))]
    holder = draw(st.sampled_from(names))
    memory = st.one_of(st.integers(100, 2000), st.just(PLENTY)) if tight else st.just(PLENTY)
    devices = tuple(
        ClusterDevice(name, draw(memory), draw(st.sampled_from([0.5, 1.0, 3.0])), name == holder)
        for name in draw(st.permutations(names))
    )
    pairs = [(a, b) for a in names for b in names if a != b]
    listed = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Cluster(devices, draw(LINKS), {pair: draw(LINKS) for pair in listed})


def household(seed: int, units: int, devices: int) -> tuple[Profile, Cluster]:
    """A random model on unlike devices and links of 1 to 100 MB/s, the same for a seed."""
    random = Random(seed)
    sizes = (1, 4, 16, 64)
    base = [10 ** random.uniform(-4, -2.3) for _ in range(units)]
    times = tuple(
        UnitTimes(
            tuple(seconds * (0.6 + 0.4 * size) for seconds in base),
            tuple(2 * seconds * (0.6 + 0.4 * size) for seconds in base),
        )
        for size in sizes
    )
    model = tuple(
        Unit(
            f"unit{i}",
            parameter_bytes=random.randrange(200_000),
            output_bytes=int(10 ** random.uniform(2, 5)),
            activation_bytes=random.randrange(1000, 100_000),
        )
        for i in range(units)
    )
    names = [f"device{i}" for i in range(devices)]
    links = {
        (a, b): ClusterLink(10 ** random.uniform(6, 8), random.choice((0.0, 0.001, 0.005)))
        for a in names
        for b in names
        if a != b and random.random() < 0.6
    }
    members = tuple(ClusterDevice(n, 10**9, random.uniform(1, 4), n == names[0]) for n in names)
    profile = Profile("random", 12288, 8, model, 1.0, TimeTable(sizes, times))
    return profile, Cluster(members, ClusterLink(12.5e6, 0.001), links)


def tight_household(
    seed: int, units: int, devices: int, least_part: float = 0.25
) -> tuple[Profile, Cluster]:
    """The same with memory for a part of the model each, with 8 samples of it."""
    profile, cluster = household(seed, units, devices)
    random = Random(seed)
    whole = sum(3 * unit.parameter_bytes + 8 * unit.activation_bytes for unit in profile.units)
    members = tuple(
        replace(device, memory_bytes=int(whole * random.uniform(least_part, 1.0)))
        for device in cluster.devices
    )
    return profile, replace(cluster, devices=members)
