"""The tables of the Asteroid and FTPipeHD papers by our simulator, published beside ours.

    python -m tools.paper_tables                        units' times by their flops: repeatable
    python -m tools.paper_tables --measure FOLDER       measured on this machine, kept in FOLDER
    python -m tools.paper_tables --only 4 13            table 4 and figure 13 alone

Testbeds and profiles: `tools/paper_testbeds.py`; other systems: `tools/baselines.py`. Rounds are
synchronous (FTPipeHD's asynchronous), by the plain cost model. As in the papers every device has
its own data. Micro-batch sizes are free for every planner, since the papers state none. "behind"
marks where our ratio is below the published one. That can mean a slower plan or a faster baseline:
table 4 therefore shows the speed-up over one device, which depends on no baseline, with the most
that the devices could reach together ("all devices"), and below it how fast the baselines
themselves are.

Takes three minutes on one core once the profiles are there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tools.baselines import dapple_like, equal_stages
from tools.paper_testbeds import ENVIRONMENTS, Model, all_models, cluster, fed_locally

TABLE_4 = {  # model: (environment, Mbit/s): published speed-up over device, DP, PP
    "efficientnet-b1": {
        ("A", 100): (4.4, 2.1, 2.8),
        ("B", 100): (3.0, 4.8, 9.7),
        ("B", 1000): (3.7, 2.1, 1.4),
    },
    "mobilenetv2": {
        ("A", 100): (4.5, 1.5, 3.5),
        ("B", 100): (3.2, 2.3, 11.2),
        ("B", 1000): (3.8, 1.2, 1.3),
    },
    "resnet50": {
        ("A", 100): (3.4, 3.6, 5.8),
        ("B", 100): (1.5, 6.1, 12.2),
        ("B", 1000): (3.7, 2.9, 3.1),
    },
    "bert-small": {
        ("A", 100): (3.5, 6.4, 1.0),
        ("B", 100): (1.3, 6.8, 1.0),
        ("B", 1000): (3.9, 4.2, 1.3),
    },
}
FIGURE_13 = {  # its ranges over four models and two environments; the bars' values are not printed
    "EDDL": (1.6, 6.9),
    "PipeDream": (1.3, 2.1),
    "Dapple": (1.2, 1.8),
}
FTPIPEHD_RATIO = 6.8
FTPIPEHD_BATCH = 256
FTPIPEHD_MEMORY_BYTES = 64 * 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A model in an environment."""

    model: Model
    cluster: Cluster

    @property
    def profile(self) -> Profile:
        """The model's, with local data."""
        return fed_locally(self.model.profile)

    def plan(self, planner: str) -> Plan | None:
        """The planner's answer, None where nothing fits."""
        try:
            return make_plan(
                self.profile, self.cluster, PlanRequest(self.model.batch_size, planner=planner)
            )
        except PlanError:
            return None

    def speed(self, planner: str) -> float | None:
        """Samples/s of that planner's answer."""
        plan = self.plan(planner)
        return None if plan is None else plan.predicted.samples_per_s

    @property
    def all_devices(self) -> float:
        """Speed-up over the fastest device if all computed all the time."""
        fastest = min(device.slowdown for device in self.cluster.devices)
        return sum(fastest / device.slowdown for device in self.cluster.devices)


def table_4(models: Mapping[str, Model]) -> Iterator[str]:
    """Speed-up of the plan over on-device, DP and PP, published and ours."""
    yield "## Asteroid, table 4: speed-up over one device, DP and PP (published / ours)"
    yield ""
    yield "| model | env. | all devices | plan over: device | DP | PP | our plan | |"
    yield "|---|---|---|---|---|---|---|---|"
    below = ["| model | env. | DP over device | PP over device | `hybrid` over device |"]
    below.append("|---|---|---|---|---|")
    for name, rows in TABLE_4.items():
        for (environment, mbit), published in rows.items():
            case = Case(models[name], cluster(models[name], ENVIRONMENTS[environment], mbit))
            plan = case.plan("auto")
            device, dp, pp, hybrid = map(case.speed, ("single", "dp", "pp", "hybrid"))
            ours = None if plan is None else plan.predicted.samples_per_s
            yield f"| {name} | {environment} {mbit} | {case.all_devices:.2f} |" + _beside(
                published, [_ratio(ours, other) for other in (device, dp, pp)], _shape(plan)
            )
            theirs = [published[0] / published[1], published[0] / published[2]]
            shown = [
                f"{p:.2f} / {_times(_ratio(speed, device))}"
                for p, speed in zip(theirs, (dp, pp), strict=True)
            ]
            below.append(
                f"| {name} | {environment} {mbit} | {' | '.join(shown)}"
                f" | {_times(_ratio(hybrid, device))} |"
            )
    yield ""
    yield "The baselines themselves, over one device (published, from the ratios above / ours):"
    yield ""
    yield from below


def _beside(published: Sequence[float], ours: Sequence[float | None], shape: str) -> str:
    shown = [f" {p} / {_times(r)} |" for p, r in zip(published, ours, strict=True)]
    behind = [
        what
        for what, p, r in zip(("device", "DP", "PP"), published, ours, strict=True)
        if r is not None and r < p
    ]
    return f"{''.join(shown)} {shape} | {'behind ' + ', '.join(behind) if behind else ''} |"


def figure_13(models: Mapping[str, Model]) -> Iterator[str]:
    """Throughput over the other systems in environments B and C."""
    yield "## Asteroid, figure 13: our throughput over other systems', 100 Mbit/s"
    yield ""
    listed = " | ".join(f"{name} ({low}-{high}x)" for name, (low, high) in FIGURE_13.items())
    yield f"| model | env. | {listed} | `hybrid` | our samples/s |"
    yield "|---|---|---|---|---|---|---|"
    seen: dict[str, list[float]] = {name: [] for name in FIGURE_13}
    for name, model in models.items():
        for environment in "BC":
            case = Case(model, cluster(model, ENVIRONMENTS[environment], 100))
            ours, others = case.speed("auto"), _other_systems(case)
            ratios = {system: _ratio(ours, speed) for system, speed in others.items()}
            for system, ratio in ratios.items():
                seen[system] += [] if ratio is None else [ratio]
            cells = " | ".join(_times(ratio) for ratio in ratios.values())
            hybrid = _times(_ratio(ours, case.speed("hybrid")))
            yield f"| {name} | {environment} | {cells} | {hybrid} | {ours or 0:.1f} |"
    yield ""
    for system, (low, high) in FIGURE_13.items():
        ratios_seen = seen[system]
        reached = f"{min(ratios_seen):.1f}-{max(ratios_seen):.1f}x" if ratios_seen else "none fits"
        behind = bool(ratios_seen) and (min(ratios_seen) < low or max(ratios_seen) < high)
        yield f"- over {system}: published {low}-{high}x, ours {reached}{' behind' * behind}"


def _other_systems(case: Case) -> dict[str, float | None]:
    request = PlanRequest(case.model.batch_size)
    answers: dict[str, float | None] = {
        "EDDL": case.speed("dp"),
        "PipeDream": case.speed("pipedream"),
    }
    try:
        answers["Dapple"] = dapple_like(case.profile, case.cluster, request).samples_per_s
    except PlanError:
        answers["Dapple"] = None
    return answers


def ftpipehd(models: Mapping[str, Model]) -> Iterator[str]:
    """Two equal devices and one ten times slower, straight pipelines of three stages."""
    yield f"## FTPipeHD: one of three devices ten times slower (published {FTPIPEHD_RATIO}x)"
    yield ""
    yield "MobileNetV2, mini-batches of 256, steady asynchronous running; samples/s."
    yield ""
    yield "| slow device | Mbit/s | PipeDream's partition | `ftpipehd` | `auto` | ratios |"
    yield "|---|---|---|---|---|---|"
    model = models["mobilenetv2"]
    for place in range(3):
        for mbit in (100, 1000):
            yield _ftpipehd_row(model, place, mbit)


def _ftpipehd_row(model: Model, slow: int, mbit: int) -> str:
    devices = tuple(
        ClusterDevice(f"d{i}", FTPIPEHD_MEMORY_BYTES, 10.0 if i == slow else 1.0, holder=i == 0)
        for i in range(3)
    )
    three = Cluster(devices, cluster(model, ["tx2"], mbit).default_link)
    profile = fed_locally(model.profile)
    split = BatchSplit(FTPIPEHD_BATCH * 3, FTPIPEHD_BATCH)
    cost = CostModel(profile, three, mode=PlanMode.ASYNC)
    speeds = [equal_stages(cost, split, (0, 1, 2), reference=(slow + 1) % 3).samples_per_s]
    for planner in ("ftpipehd", "auto"):
        request = PlanRequest(FTPIPEHD_BATCH, planner=planner, mode=PlanMode.ASYNC)
        speeds.append(make_plan(profile, three, request).predicted.samples_per_s)
    shown = " | ".join(f"{speed:.1f}" if speed else "does not fit" for speed in speeds)
    ratios = [_ratio(speed, speeds[0]) for speed in speeds[1:]]
    behind = "" if (ratios[1] or 0.0) >= FTPIPEHD_RATIO else " behind"
    return (
        f"| {('first', 'second', 'last')[slow]} | {mbit} | {shown}"
        f" | {' '.join(_times(ratio) for ratio in ratios)}{behind} |"
    )


def _ratio(ours: float | None, other: float | None) -> float | None:
    return ours / other if ours and other else None


def _times(ratio: float | None) -> str:
    return "does not fit" if ratio is None else f"{ratio:.2f}x"


def _shape(plan: Plan | None) -> str:
    """The kinds of every stage's devices, as in Asteroid's figure 12: XXX-TT."""
    if plan is None:
        return "nothing fits"
    letters = {"nano": "N", "tx2": "T", "nx": "X"}
    return "-".join(
        "".join(sorted(letters[device.name[:-2]] for device in stage.devices))
        for stage in plan.stages
    )


TABLES = {"4": table_4, "13": figure_13, "ftpipehd": ftpipehd}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="measure; keep in FOLDER")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    return parser.parse_args()


def main() -> int:
    """Print the tables."""
    args = parse()
    models = all_models(args.measure)
    for name in args.only:
        for line in TABLES[name](models):
            print(line, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
