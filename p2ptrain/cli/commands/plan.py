"""`p2ptrain plan`: from a profile and a cluster to a plan, without a network.

With `--compare`, every planner on one question, beside the best plan found, and what each device
adds to that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.cli import arguments
from p2ptrain.cli.output import Output, aligned
from p2ptrain.cli.planner_arguments import PLANNERS, add_tiling, any_planner, check_tiling
from p2ptrain.cli.usage import DONE, Command, Options, UsageError, check_folders
from p2ptrain.errors import PlanError, size_text
from p2ptrain.job.planning_files import read_cluster, read_profile, write_whole

if TYPE_CHECKING:
    from p2ptrain.plan.types.cluster import Cluster
    from p2ptrain.plan.types.plan import Plan
    from p2ptrain.plan.types.profile import Profile
    from p2ptrain.plan.types.request import PlanRequest

_DESCRIPTION = """\
Decides which device computes which layers of a model, and predicts the speed. It needs a
profile (`p2ptrain profile`) and a cluster file, and uses no network. --json prints the plan
(p2ptrain.plan/1) on one line; `p2ptrain simulate` shows its timeline.

planners:
""" + "\n".join(f"  {name:<10} {what}" for name, what in PLANNERS.items())

_EXAMPLE = """\
  p2ptrain plan --profile digits.json --cluster home.json --batch-size 64 --out plan.json
  p2ptrain plan --profile digits.json --cluster home.json --batch-size 64 \\
      --exclude old-phone --cap laptop=0.5 --json
  p2ptrain plan --profile digits.json --cluster home.json --batch-size 64 --compare"""

_TITLES = (
    *("planner", "seconds", "samples/s", "of auto", "stages", "devices"),
    *("micro-batches", "peak memory"),
)

_DEVICE_TITLES = ("device", "samples/s without it", "it adds", "")

MOST_WITHOUT = 16
"""Devices without which a plan is looked for: each takes as long as `auto`."""


def _options(own: Options) -> None:
    arguments.add_planning_files(own)
    _add_question(own.group("what to plan"))
    _add_constraints(own.group("constraints"))
    own.value("--out FILE", arguments.path, "write the plan here too")


def _add_question(group: Options) -> None:
    group.value("--batch-size N", arguments.positive, "samples of one update", required=True)
    group.value(
        "--micro-batch B",
        arguments.positive,
        "samples computed at once, as parts of a batch (default: the planner chooses); "
        "ignored with --mode async",
    )
    planners = group.one_of()
    planners.value("--planner NAME", any_planner, "default: auto", default="auto")
    add_tiling(group)
    planners.flag("--compare", "show the plans of all planners; --json prints one line for each")
    group.choice(
        "--mode",
        ("sync", "async"),
        "sync (default): least time for a step; async: most samples a second",
        default="sync",
    )


def _add_experimental(group: Options) -> None:
    group.flag(
        "--overlap", "predict what train really does, instead of the simpler documented cost model"
    )
    group.choice(
        "--schedule",
        ("1f1b", "zero-bubble", "auto"),
        "order of the work: 1f1b: forward and backward in turn; zero-bubble: gradients of "
        "weights wait until a device has nothing else to do; auto: the faster one (default: auto "
        "with --overlap and --planner auto, else 1f1b)",
    )
    group.flag("--straight", "one device for each part of the model")


def _add_constraints(group: Options) -> None:
    group.flag("--private", "the device with the data computes the first and the last layers alone")
    group.value(
        "--exclude NAME",
        str,
        "devices not to use; the device with the data then only sends it",
        nargs="+",
        action="extend",
        default=[],
    )
    group.value(
        "--require NAME", str, "devices that must be used", nargs="+", action="extend", default=[]
    )
    group.values(
        "--cap NAME=PART",
        arguments.name_and_part,
        "give a device at most this part of the work, such as pi=0.25; may be repeated",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Plan, and show the plan."""
    from p2ptrain.tiling.planning.make_plan import make_plan

    out: Path | None = args.out
    check_folders(out)
    if out is not None and args.compare:
        raise UsageError("--out writes one plan: choose it with --planner instead of --compare")
    profile, cluster = read_profile(args.profile), read_cluster(args.cluster)
    if args.compare:
        _compare(profile, cluster, plan_request(args, cluster), output)
        return DONE
    request = plan_request(args, cluster)
    plan = make_plan(profile, cluster, request)
    if out is not None:
        write_whole(out, json.dumps(plan.to_json(), indent=1, ensure_ascii=False))
    text = ""
    if not output.json:
        text = _text(plan, profile, cluster) + _faster_alone(plan, profile, cluster, request)
    output.result(plan.to_json(), text)
    return DONE


def _faster_alone(plan: Plan, profile: Profile, cluster: Cluster, request: PlanRequest) -> str:
    """That one device alone would be faster, where it would; `auto` is never slower than one."""
    from p2ptrain.tiling.planning.make_plan import make_plan

    if request.planner == "auto":
        return ""
    asked = replace(request, planner="single", grid=None, groups_of_units=())
    try:
        alone = make_plan(profile, cluster, asked)
    except PlanError:  # none can, or may be alone
        return ""
    speed = alone.predicted.samples_per_s
    if speed <= plan.predicted.samples_per_s:
        return ""
    (name,) = alone.device_names
    return f"\n\n{name} alone would be faster: {speed:,.1f} samples/s (--planner single)"


def _compare(profile: Profile, cluster: Cluster, request: PlanRequest, output: Output) -> None:
    comparison = compare(profile, cluster, request)
    if not output.json:
        output.result({}, comparison_text(comparison))
        return
    for body in comparison_json(comparison):
        output.result(body, "")


def _text(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    from p2ptrain.cli.plan_text import plan_text  # here: a program does not need it

    return plan_text(plan, profile, cluster)


def plan_request(args: argparse.Namespace, cluster: Cluster) -> PlanRequest:
    """What the command line asks. Raises UsageError, and OptionError for names in no file."""
    from p2ptrain.plan.types.request import PlanMode, PlanRequest, Schedule, all_but

    mode = PlanMode(args.mode)
    _check(args, mode is PlanMode.SYNC)
    caps = dict(args.cap)
    if len(caps) < len(args.cap):
        raise UsageError("--cap: a device is given twice")
    return PlanRequest(
        batch_size=args.batch_size,
        micro_batch=args.micro_batch,
        planner=args.planner,
        private=args.private,
        only=all_but(cluster, args.exclude) if args.exclude else None,
        required=frozenset(args.require),
        caps=caps,
        groups=not args.straight,
        mode=mode,
        overlap=args.overlap,
        schedule=None if args.schedule is None else Schedule(args.schedule),
        grid=args.grid,
        groups_of_units=args.groups,
    )


def _check(args: argparse.Namespace, is_sync: bool) -> None:
    """What contradicts itself, whatever the files say."""
    check_tiling(args)
    if args.schedule not in (None, "1f1b") and not is_sync:
        raise UsageError(f"--schedule {args.schedule} works with --mode sync only")
    for name in sorted({*args.require} & {*args.exclude}):
        raise UsageError(f"{name} is in both --require and --exclude")


@dataclass(frozen=True, slots=True)
class PlannerComparison:
    """What every planner made of one question.

    Attributes:
        plans: of those that have one; `auto` first, then the fastest first.
        refused: why the others have none, by name.
        without: by name of a device that `auto` uses, its plan without it, or why there is none.
    """

    plans: tuple[Plan, ...]
    refused: Mapping[str, str]
    without: Mapping[str, Plan | str]

    def of_auto(self, plan: Plan) -> float:
        """The plan's samples/s by those of `auto`; 1 where nothing takes time."""
        best = self.plans[0].predicted.samples_per_s
        return plan.predicted.samples_per_s / best if best else 1.0

    def added_by(self, device: str) -> float | None:
        """The part of the speed without the device that it adds; None: there is no plan then."""
        without = self.without[device]
        if isinstance(without, str) or not without.predicted.samples_per_s:
            return None
        return self.plans[0].predicted.samples_per_s / without.predicted.samples_per_s - 1


def compare(profile: Profile, cluster: Cluster, request: PlanRequest) -> PlannerComparison:
    """Ask every planner what `request` asks of one.

    Raises:
        OptionError: as `make_plan`.
        PlanError: `auto`, which has the plans of all others to choose from, finds nothing.
    """
    from p2ptrain.tiling.planning.make_plan import make_plan

    best = make_plan(profile, cluster, replace(request, planner="auto"))
    plans, refused = [], {}
    for name in PLANNERS:
        if name == "auto":
            continue
        try:
            plans.append(make_plan(profile, cluster, replace(request, planner=name)))
        except PlanError as error:
            refused[name] = str(error)
    plans.sort(key=lambda plan: -plan.predicted.samples_per_s)
    used = sorted(best.device_names - request.required)[:MOST_WITHOUT]
    without = {name: _without(name, profile, cluster, request) for name in used}
    return PlannerComparison((best, *plans), refused, without)


def _without(name: str, profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan | str:
    """The plan of `auto` without that device, or why there is none."""
    from p2ptrain.plan.types.request import all_but
    from p2ptrain.tiling.planning.make_plan import make_plan

    only = all_but(cluster, [name]) if request.only is None else request.only - {name}
    try:
        return make_plan(profile, cluster, replace(request, planner="auto", only=only))
    except PlanError as error:
        return str(error)


def comparison_json(comparison: PlannerComparison) -> Iterator[Mapping[str, Any]]:
    """One object a planner: its plan and figures, or why it has none.

    That of `auto` says what each of its devices adds.
    """
    for plan in comparison.plans:
        added = {name: comparison.added_by(name) for name in comparison.without}
        yield {
            "planner": plan.planner,
            "round_seconds": plan.predicted.round_seconds,
            "samples_per_s": plan.predicted.samples_per_s,
            "of_auto": comparison.of_auto(plan),
            "devices": len(plan.predicted.peak_bytes),
            "peak_bytes": max(plan.predicted.peak_bytes.values()),
            "plan": plan.to_json(),
            **({"added_by": added} if plan is comparison.plans[0] else {}),
        }
    for name, reason in comparison.refused.items():
        yield {"planner": name, "error": reason}


def comparison_text(comparison: PlannerComparison) -> str:
    """A table of the plans, why the other planners have none, and what each device adds."""
    lines = aligned([_TITLES, *(_row(comparison, plan) for plan in comparison.plans)])
    if comparison.refused:
        reasons = (f"  {name}: {reason}" for name, reason in comparison.refused.items())
        lines += ["", "no plan:", *reasons]
    lines += ["", *aligned([_DEVICE_TITLES, *_device_rows(comparison)])]
    return "\n".join(lines)


def _device_rows(comparison: PlannerComparison) -> Iterator[Sequence[str]]:
    for name, without in comparison.without.items():
        if isinstance(without, str):
            yield name, "none", "everything", without
        else:
            predicted, added = without.predicted, comparison.added_by(name)
            part = "" if added is None else f"{added:+.1%}"
            yield name, f"{predicted.samples_per_s:,.1f}", part, ""
    for out in comparison.plans[0].left_out:
        yield out.name, "", "not used", out.reason


def _row(comparison: PlannerComparison, plan: Plan) -> Sequence[str]:
    from p2ptrain.plan.types.request import PlanMode

    predicted, count = plan.predicted, plan.split.micro_batches
    return (
        plan.planner,
        f"{predicted.round_seconds:.4g}",
        f"{predicted.samples_per_s:,.1f}",
        f"{comparison.of_auto(plan):.3f}",
        str(len(plan.stages)),
        str(len(predicted.peak_bytes)),
        "none" if plan.mode is PlanMode.ASYNC else f"{count} x {plan.micro_batch}",
        size_text(max(predicted.peak_bytes.values())),
    )


COMMAND = Command(
    *("plan", run, "plan a model's training from files, without a network"),
    *(_DESCRIPTION, _EXAMPLE, _options),
    experimental=_add_experimental,
    defaults={"logs": False},
)
