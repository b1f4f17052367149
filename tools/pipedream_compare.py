"""PipeDream's published configurations beside our plans, for 16 equal devices, by our simulator.

    python -m tools.pipedream_compare --profile vgg16=vgg16.json --profile gnmt=gnmt.json

The profiles come from `tools/pipedream_graph.py`. Published (SOSP 2019, table 1, and the 16-device
configurations of its repository): 15-1 for VGG-16 and AlexNet (a stage on 15 devices, then one on
one), 16 for ResNet-50 (plain data parallelism), straight pipelines for GNMT. Only the stage and
replica counts are taken from there; their borders are found here, the best by the simulator, which
is more than the papers promise.

Every configuration trains mini-batches of the published size for each device. PipeDream runs
them asynchronously; "sync" is our synchronous round of 16 or 240 of them, each whole on one
replica, "async" is steady running as PipeDream's. Devices read their own data, as there: none
feeds another. Three networks: one GPU a server with 10 or with 25 Gbit/s, and four servers of four
GPUs with PCIe inside and 10 Gbit/s between.

Prints a Markdown table of samples/s; the ratios are ours over the published configuration's. Exit
code 1 if `auto` is slower than a published configuration anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tools.baselines import replicated_pipeline

DEVICES = 16
GBIT = 1e9 / 8
PCIE = ClusterLink(bytes_per_s=12e9, latency_s=10e-6)
LATENCY_S = 50e-6
MEMORY_BYTES = 16 * 10**9


@dataclass(frozen=True, slots=True)
class Published:
    """What PipeDream ran on 16 devices.

    Attributes:
        replicas: devices of each stage; several alternatives where paper and repository differ.
        mini_batch: samples, for each device.
    """

    replicas: tuple[tuple[int, ...], ...]
    mini_batch: int


PUBLISHED = {
    "vgg16": Published(((15, 1),), 64),
    "alexnet": Published(((15, 1),), 256),
    "resnet50": Published(((16,), (8, 4, 4)), 128),
    "gnmt": Published(((1,) * 16, (1,) * 10), 64),
    "gnmt_large": Published(((1,) * 16, (1,) * 14, (1,) * 12 + (3, 1)), 64),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison; samples/s, None where nothing fits.

    Attributes:
        shape: our plan's replicas.
    """

    model: str
    network: str
    mode: str
    published: dict[str, float | None]
    pipedream: float | None
    auto: float | None
    shape: str

    @property
    def best_published(self) -> float:
        """The fastest of the published configurations; 0 where none fits."""
        return max((speed for speed in self.published.values() if speed), default=0.0)


def equal_devices(bytes_per_s: float, memory_bytes: int, a_server: int = 1) -> Cluster:
    """DEVICES equal ones, `a_server` in a server, `bytes_per_s` between servers."""
    names = [f"gpu{i:02}" for i in range(DEVICES)]
    inside = {
        (a, b): PCIE
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j and i // a_server == j // a_server
    }
    devices = tuple(
        ClusterDevice(name, memory_bytes, holder=i == 0) for i, name in enumerate(names)
    )
    return Cluster(devices, ClusterLink(bytes_per_s, LATENCY_S), inside)


def networks(memory_bytes: int) -> dict[str, Cluster]:
    """The networks by name."""
    return {
        "10 Gbit/s": equal_devices(10 * GBIT, memory_bytes),
        "25 Gbit/s": equal_devices(25 * GBIT, memory_bytes),
        "4x4, 10 Gbit/s": equal_devices(10 * GBIT, memory_bytes, a_server=4),
    }


def compare(
    profile: Profile, network: str, cluster: Cluster, request: PlanRequest, rounds: int
) -> Row:
    """Rounds of `rounds` mini-batches, each whole on one replica, or steady running."""
    published = PUBLISHED[profile.model]
    size, steady = published.mini_batch, request.mode is PlanMode.ASYNC
    cost = CostModel(profile, cluster, mode=request.mode)
    speeds: dict[str, float | None] = {}
    for replicas in published.replicas:
        if len(replicas) <= len(profile.units):
            count = window(replicas) if steady else rounds
            split = BatchSplit(count * size, size)
            speeds[shape(replicas)] = replicated_pipeline(cost, split, replicas).samples_per_s
    if steady:
        asked = replace(request, batch_size=size)
    else:
        asked = replace(request, batch_size=rounds * size, micro_batch=size)
    pipedream, auto = (
        planned(profile, cluster, replace(asked, planner=planner))
        for planner in ("pipedream", "auto")
    )
    return Row(
        model=profile.model,
        network=network,
        mode="async" if steady else f"sync {rounds}",
        published=speeds,
        pipedream=pipedream.predicted.samples_per_s if pipedream else None,
        auto=auto.predicted.samples_per_s if auto else None,
        shape=shape([len(stage.devices) for stage in auto.stages]) if auto else "none fits",
    )


def window(replicas: Sequence[int]) -> int:
    """Mini-batches that all replicas share evenly, more than any pipeline here is deep."""
    even = math.lcm(*replicas)
    return even * -(-2 * DEVICES // even)


def planned(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan | None:
    """The plan, or None where nothing fits."""
    try:
        return make_plan(profile, cluster, request)
    except PlanError:
        return None


def shape(replicas: Sequence[int]) -> str:
    """15-1; "straight 10" of ten single devices; "12x1-3-1" where twelve of them come first."""
    if len(replicas) > 1 and set(replicas) == {1}:
        return f"straight {len(replicas)}"
    runs = [(count, len(list(equal))) for count, equal in groupby(replicas)]
    return "-".join(
        f"{times}x{count}" if times > 2 else "-".join([str(count)] * times) for count, times in runs
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown, samples/s and our ratios over the best published configuration."""
    yield "| model | network | mode | published | pipedream | auto | our replicas | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        listed = ", ".join(f"{name}: {_speed(speed)}" for name, speed in row.published.items())
        yield (
            f"| {row.model} | {row.network} | {row.mode} | {listed} | {_speed(row.pipedream)}"
            f" ({_ratio(row.pipedream, row)}) | {_speed(row.auto)} | {row.shape}"
            f" | {_ratio(row.auto, row)} |"
        )


def _speed(samples_per_s: float | None) -> str:
    return "does not fit" if samples_per_s is None else f"{samples_per_s:.0f}"


def _ratio(samples_per_s: float | None, row: Row) -> str:
    if not samples_per_s or not row.best_published:
        return "-"
    return f"{samples_per_s / row.best_published:.2f}x"


def read_profile(argument: str) -> Profile:
    """MODEL=FILE; the inputs are read from each device's own disk."""
    name, _, path = argument.partition("=")
    if name not in PUBLISHED:
        raise argparse.ArgumentTypeError(f"no published configuration of {name!r}")
    profile = Profile.from_json(json.loads(Path(path).read_text(encoding="utf-8")), path)
    return replace(profile, model=name, input_bytes=0, target_bytes=0)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile", type=read_profile, action="append", required=True, metavar="MODEL=FILE"
    )
    parser.add_argument("--rounds", type=int, nargs="+", default=[16, 240])
    parser.add_argument("--memory", type=int, default=MEMORY_BYTES, help="bytes of each device")
    return parser.parse_args()


def main() -> int:
    """Compare, print, judge."""
    args = parse()
    rows = [
        compare(profile, network, cluster, PlanRequest(1, mode=mode), rounds)
        for profile in args.profile
        for network, cluster in networks(args.memory).items()
        for mode, rounds in [
            *((PlanMode.SYNC, count) for count in args.rounds),
            (PlanMode.ASYNC, 0),
        ]
    ]
    print("\n".join(table(rows)))
    behind = [row for row in rows if (row.auto or 0.0) < row.best_published * (1 - 1e-9)]
    for row in behind:
        print(f"behind: {row.model}, {row.network}, {row.mode}: {_ratio(row.auto, row)}")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
