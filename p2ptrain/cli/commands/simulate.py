"""`p2ptrain simulate`: the predicted timeline of a plan, without a network."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli import arguments
from p2ptrain.cli.output import Output, aligned
from p2ptrain.cli.usage import DONE, Command, Options, UsageError, check_folders
from p2ptrain.errors import size_text
from p2ptrain.job.planning_files import naming, read_cluster, read_plan, read_profile, write_whole

if TYPE_CHECKING:
    from p2ptrain.plan.simulation.simulate import Simulation
    from p2ptrain.plan.types.cluster import Cluster
    from p2ptrain.plan.types.timeline import TimelineEntry

_DESCRIPTION = """\
Predicts one step of a plan (p2ptrain.plan/1): when each device computes, sends and waits, and
how much memory it needs. Of an asynchronous plan it shows a few steps. --gantt draws it."""

_EXAMPLE = """\
  p2ptrain simulate --profile digits.json --cluster home.json --plan plan.json --gantt round.svg"""


def _options(own: Options) -> None:
    arguments.add_planning_files(own)
    own.value(
        "--plan PLAN.json", arguments.path, "the plan, as `p2ptrain plan` writes it", required=True
    )
    own.value(
        "--batch-size N",
        arguments.positive,
        "samples of one update (default: computed from the plan)",
    )
    own.flag(
        "--overlap", "predict what train really does, instead of the simpler documented cost model"
    )
    own.choice(
        "--schedule", ("1f1b", "zero-bubble"), "use this order of the work (default: the plan's)"
    )
    own.value("--gantt FILE.svg", _svg_file, "draw the timeline into this file")
    own.value(
        "--trace FILE.json",
        arguments.path,
        "write the timeline into this file, for ui.perfetto.dev, as train --trace does",
    )


def _svg_file(text: str) -> Path:
    path = arguments.path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg")
    return path


def run(args: argparse.Namespace, output: Output) -> int:
    """Simulate, draw and show."""
    from p2ptrain.cli.plan_text import period
    from p2ptrain.plan.types.request import Schedule
    from p2ptrain.tiling.planning.tiled_plan import simulate_plan

    chart: Path | None = args.gantt
    check_folders(chart, args.trace)
    profile, cluster = read_profile(args.profile), read_cluster(args.cluster)
    plan, shown = read_plan(args.plan, args.batch_size), bool(output.json or chart or args.trace)
    if plan.stages[0].tiling is not None and args.schedule is not None:
        raise UsageError("--schedule does not work with a plan in tiles: leave it out")
    with naming(args.plan):
        simulation = simulate_plan(
            *(plan, profile, cluster),
            timeline=shown,
            overlap=args.overlap,
            schedule=None if args.schedule is None else Schedule(args.schedule),
        )
    if chart is not None:
        from p2ptrain.plan.gantt import draw_gantt

        write_whole(chart, draw_gantt(simulation, profile.model, period(plan.mode)))
    if args.trace is not None:
        write_whole(args.trace, _trace(simulation, profile.model))
    text = "" if output.json else "\n".join(_lines(simulation, cluster, period(plan.mode)))
    output.result(_body(simulation), text)
    return DONE


def _body(simulation: Simulation) -> Mapping[str, Any]:
    return {
        "round_seconds": simulation.round_seconds,
        "samples_per_s": simulation.samples_per_s,
        "busy_share": dict(simulation.busy_share),
        "waiting_share": _waiting_share(simulation),
        "peak_bytes": dict(simulation.peak_bytes),
        "timeline": [_entry(entry) for entry in simulation.timeline],
    }


def _trace(simulation: Simulation, model: str) -> str:
    from p2ptrain.plan.chrome_trace import simulated_transfers, trace_text

    entries = list(simulated_transfers(simulation.timeline))
    devices = dict.fromkeys(entry.device for entry in entries)
    return "".join(trace_text(lambda: entries, list(devices), {"simulated": model}))


def _waiting_share(simulation: Simulation) -> Mapping[str, float]:
    # Sums of times are rounded: a device that never waits may seem to be busy for longer.
    return {name: max(0.0, 1 - part) for name, part in simulation.busy_share.items()}


def _entry(entry: TimelineEntry) -> Mapping[str, Any]:
    return {
        "kind": entry.kind,
        "device": entry.device,
        "stage": entry.stage,
        "micro_batch": entry.micro_batch,
        "start": entry.start_seconds,
        "end": entry.end_seconds,
        "receiver": entry.receiver,
    }


def _lines(simulation: Simulation, cluster: Cluster, each: str) -> list[str]:
    head = f"{simulation.round_seconds:.4g} s a {each}, {simulation.samples_per_s:,.1f} samples/s"
    titles = ("device", "busy", "waiting", "peak memory", "of", "")
    return [head, "", *aligned([titles, *_rows(simulation, cluster)])]


def _rows(simulation: Simulation, cluster: Cluster) -> Iterator[Sequence[str]]:
    waiting = _waiting_share(simulation)
    for name, busy in simulation.busy_share.items():
        peak, memory = simulation.peak_bytes[name], cluster.device(name).memory_bytes
        over = "too little memory" if peak > memory else ""
        yield name, f"{busy:.0%}", f"{waiting[name]:.0%}", size_text(peak), size_text(memory), over


COMMAND = Command(
    *("simulate", run, "predict the timeline of a plan, without a network"),
    *(_DESCRIPTION, _EXAMPLE, _options),
    defaults={"logs": False},
)
