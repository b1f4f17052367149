"""Options of `train`: declared, checked, made into `TrainOptions`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.api.sinks import check_trackers, command_words
from p2ptrain.cli import arguments
from p2ptrain.cli.planner_arguments import PLANNERS, add_tiling, any_planner, check_tiling
from p2ptrain.cli.usage import Options, UsageError, check_folders
from p2ptrain.errors import OptionError
from p2ptrain.job.planning_files import read_plan

if TYPE_CHECKING:
    from p2ptrain.job.asynchrony import AsyncOptions, FtpipehdOptions
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions


def add_household(group: Options) -> None:
    group.value(
        "--wait-for N",
        arguments.positive,
        "start when N devices are here, this one included (default: 1)",
        default=1,
    )
    group.value(
        "--wait-timeout S", arguments.seconds, "give up waiting after S seconds (default: never)"
    )
    group.value(
        "--planner NAME",
        any_planner,
        f"auto (default): {PLANNERS['auto']}. Others are for comparison: see  p2ptrain plan --help",
        default="auto",
    )
    add_tiling(group)
    group.choice(
        "--mode",
        ("sync", "async", "auto"),
        "sync (default): the same results as on one device; async: faster steps with slightly "
        "older weights; auto: the one that should reach the same accuracy sooner",
        default="sync",
    )
    group.value(
        "--plan PLAN.json",
        arguments.path,
        "train by the plan in this file, from  p2ptrain plan  or made by hand; it changes "
        "only when a device joins, leaves or fails",
    )
    group.flag("--dry-run", "measure the devices, plan and show the plan; train nothing")
    group.flag("--private", "raw inputs and labels never leave this device")
    group.flag("--local", "train on this device alone, without a network")
    group.choice(
        "--engine",
        ("own", "torch"),
        "torch: inside torchrun, on torch.distributed; no household, no plan",
        default="own",
    )
    group.flag(
        "--no-replan",
        "change the plan only when a device joins, leaves or fails, not when speeds change",
    )
    group.choice(
        "--wire",
        ("exact", "bf16", "int8"),
        "how values travel between devices: exact (default), or rounded to bf16 (half the "
        "data) or int8 (a quarter), which changes results a little",
        default="exact",
    )


def add_experimental(group: Options) -> None:
    group.choice(
        "--recovery",
        ("light", "heavy", "respipe"),
        "the plan after a failure: light (default): close to the old one; heavy: a new one; "
        "respipe: the failed device's part goes to the device after it",
        default="light",
    )
    group.value(
        "--whole-copies N",
        arguments.positive,
        "keep a copy of everything in this device's memory, renewed about every N updates; "
        "used when several devices fail at once",
    )
    group.flag(
        "--vertical-sync",
        "with --mode async: all devices use weights of the same age for a batch (default: "
        "each device its newest)",
    )
    group.value(
        "--aggregate K",
        arguments.positive,
        "with --mode async: from time to time continue with the mean of the weights of "
        "different ages; a larger K does it less often",
    )
    group.choice(
        "--versions",
        (2,),
        "with --mode async: keep only two copies of the weights on each device; needs less memory",
        metavar="2",
        type=int,
    )
    group.flag(
        "--no-stashing",
        "with --mode async: keep only one copy of the weights, so that gradients belong to "
        "other weights than the outputs",
    )
    group.value(
        "--repartition FIRST,EVERY",
        arguments.two_counts,
        "with --mode async --planner ftpipehd: divide the layers again where that is faster, "
        "after FIRST updates and then every EVERY (default: 10,100)",
    )
    group.value(
        "--replicate CHAIN,WHOLE",
        arguments.two_counts,
        "with --mode async --planner ftpipehd: copy each device's weights to a neighbour "
        "every CHAIN updates, and to this device every WHOLE (default: 50,100)",
    )


def add_overrides(group: Options) -> None:
    group.value("--epochs E", arguments.positive, "how often to go through the data")
    group.value("--batch-size N", arguments.positive, "samples of one update")
    group.value(
        "--micro-batch B",
        arguments.positive_or_auto,
        "samples computed at once, as parts of a batch; auto: what is fastest, even if "
        "results differ (default: what is fastest without changing results)",
    )
    group.value("--steps S", arguments.positive, "stop after S updates in total")


def add_files(group: Options) -> None:
    group.value("--out FILE.safetensors", _weights_file, "write the weights here")
    group.value(
        "--checkpoint DIR",
        arguments.path,
        "save the training into this folder from time to time, so that --resume can continue",
    )
    group.value(
        "--checkpoint-every STEPS",
        arguments.positive,
        "save every STEPS updates and after each epoch (default: after each epoch, and "
        "between where that takes little time)",
    )
    group.value("--resume DIR", arguments.path, "continue from the checkpoint in this folder")
    group.value(
        "--trace FILE.json",
        arguments.path,
        "write what every device did when into this file, for ui.perfetto.dev",
    )
    group.value(
        "--log-dir DIR",
        arguments.path,
        "write TensorBoard event files into this folder: loss, learning rate, metrics",
    )
    group.values(
        "--report-to NAME",
        str,
        "send the same numbers to wandb, mlflow or trackio, where that is installed",
    )
    group.value(
        "--notify CMD",
        str,
        "run this program, without a shell, when the job ends or needs a person; it gets the "
        "event as JSON on stdin",
    )
    for what, whose in (("profile", "model"), ("cluster", "devices"), ("plan", "plan")):
        use = "--plan" if what == "plan" else " p2ptrain plan"
        text = f"with --dry-run: write the {whose} into this file, for {use}"
        group.value(f"--write-{what} {what[0].upper()}.json", arguments.path, text)
    group.flag(
        "--fresh", "start from the beginning, even where an unfinished training could be continued"
    )


def _weights_file(text: str) -> Path:
    path = arguments.path(text)
    if path.suffix != ".safetensors":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .safetensors")
    return path


_FOR_TORCH = frozenset(
    {"script", "job_options", "epochs", "batch_size", "micro_batch", "steps", "engine", "threads"}
    | {"out", "checkpoint", "checkpoint_every", "resume", "log_dir", "report_to", "notify"}
    | {"device", "state_dir", "json", "debug", "run", "usual"}
)


def check_for_torch(args: argparse.Namespace) -> None:
    """Raises UsageError: an option that means nothing with --engine torch; names it."""
    for name, value in vars(args).items():
        if name not in _FOR_TORCH and value != args.usual(name):
            raise UsageError(
                f"--engine torch has no household: leave out --{name.replace('_', '-')}"
            )
    check_options(args)


def check_options(args: argparse.Namespace) -> None:
    """Refuse what is wrong without the script before it is loaded, which may take a while."""
    try:
        check_trackers(args.report_to)
        if args.notify is not None:
            command_words(args.notify)
    except OptionError as error:
        raise UsageError(str(error)) from error
    check_tiling(args)
    wrong = [*_wrong_places(args), *_wrong_plan(args), *_wrong_asynchrony(args)]
    if wrong:
        raise UsageError(wrong[0])
    check_folders(*(getattr(args, name) for name in NEW_FILES))
    if args.plan is not None:
        read_plan(args.plan, None)  # what is wrong with the file by itself


_WRITTEN = ("write_profile", "write_cluster", "write_plan")

NEW_FILES = ("out", "checkpoint", "trace", *_WRITTEN)


def _wrong_places(args: argparse.Namespace) -> Iterator[str]:
    """Where it trains, and files and folders."""
    alone = "--local trains on this device alone: leave out"
    if args.local and args.wait_for > 1:
        yield f"{alone} --wait-for"
    if args.local and args.whole_copies is not None:
        yield f"{alone} --whole-copies"
    if len(args.device) > 1 and (args.local or args.engine == "torch"):
        yield "--local, and each rank of --engine torch, computes on one device: name one"
    if args.local and args.private:
        yield "--local sends nothing anywhere: leave out --private"
    if args.checkpoint_every is not None and args.checkpoint is None:
        yield "--checkpoint-every needs --checkpoint DIR"
    for name in ("log_dir", "checkpoint"):
        folder = getattr(args, name)
        if folder is not None and folder.exists() and not folder.is_dir():
            yield f"--{name.replace('_', '-')} {folder} is a file, not a folder"
    if args.resume is not None and not args.resume.is_dir():
        yield f"--resume {args.resume}: this folder does not exist"


def _wrong_plan(args: argparse.Namespace) -> Iterator[str]:
    """Planners, plans that are given, and dry runs."""
    if args.planner == "tiles" and (args.private or args.mode == "async"):
        yield (
            "--planner tiles sends images to all devices and trains in sync: leave out "
            + ("--private" if args.private else "--mode async")
        )
    if args.planner == "dp" and args.private:
        yield (
            "--planner dp sends raw inputs and labels to every device, which --private forbids: "
            "use --planner auto or pp"
        )
    for name in _WRITTEN:
        if getattr(args, name) is not None and not args.dry_run:
            yield f"--{name.replace('_', '-')} needs --dry-run"
    if args.dry_run and args.trace is not None:
        yield "--dry-run trains nothing: leave out --trace"
    given = {
        "--planner": args.planner != "auto",
        "--mode auto": args.mode == "auto",
        "--micro-batch": args.micro_batch is not None,
    }
    for name, is_given in given.items():
        if args.plan is not None and is_given:
            yield f"--plan says that already: leave out {name}"


def _wrong_asynchrony(args: argparse.Namespace) -> Iterator[str]:
    wanted = {
        "--vertical-sync": args.vertical_sync,
        "--versions": args.versions is not None,
        "--no-stashing": args.no_stashing,
    }
    chosen = [name for name, is_wanted in wanted.items() if is_wanted]
    aggregates = ["--aggregate"] if args.aggregate is not None else []
    if args.mode == "sync" and (chosen or aggregates):
        yield f"{[*chosen, *aggregates][0]} needs --mode async"
    if args.mode == "auto" and args.no_stashing:
        yield "--no-stashing is for comparisons and needs --mode async"
    if len(chosen) > 1:
        yield f"use either {chosen[0]} or {chosen[1]}, not both"
    if aggregates and chosen and chosen[0] != "--vertical-sync":
        yield f"--aggregate needs older weights, which {chosen[0]} does not keep: leave out one"
    if args.mode == "async" and args.planner == "ftpipehd" and not args.local:
        if args.whole_copies is not None:
            yield "with --planner ftpipehd use --replicate CHAIN,WHOLE instead of --whole-copies"
        return
    for name in ("repartition", "replicate"):
        if getattr(args, name) is not None:
            yield f"--{name} needs --mode async --planner ftpipehd"


def _ftpipehd(args: argparse.Namespace) -> FtpipehdOptions:
    from p2ptrain.job.asynchrony import FtpipehdOptions

    chosen: dict[str, int] = {}
    if args.repartition is not None:
        chosen["first_repartition"], chosen["repartition"] = args.repartition
    if args.replicate is not None:
        chosen["chain"], chosen["whole"] = args.replicate
    return FtpipehdOptions(**chosen)


def _asynchrony(args: argparse.Namespace) -> AsyncOptions | None:
    from p2ptrain.job.asynchrony import AsyncOptions
    from p2ptrain.plan.types.weight_versions import Weights

    if args.mode == "sync":
        return None
    if args.versions is not None:
        return AsyncOptions(Weights.DOUBLE)
    if args.no_stashing:
        return AsyncOptions(Weights.UNSTASHED)
    weights = Weights.VERTICAL if args.vertical_sync else Weights.STASHED
    return AsyncOptions(weights, args.aggregate)


def override(job: Job, args: argparse.Namespace) -> Job:
    """`job` with the command line's numbers instead of its own. Raises UsageError."""
    changes = {
        name: value
        for name in ("epochs", "batch_size", "micro_batch")
        if (value := getattr(args, name)) is not None
    }
    if not changes:
        return job
    try:
        return dataclasses.replace(job, **changes)
    except OptionError as error:
        raise UsageError(str(error)) from error


def train_options(args: argparse.Namespace) -> TrainOptions:
    """How to run the job: options of the same names, and what several of them mean together."""
    from p2ptrain.job.train_options import TrainOptions

    names = {field.name for field in dataclasses.fields(TrainOptions)}
    same = {name: value for name, value in vars(args).items() if name in names}
    return TrainOptions(
        **same,
        wait_timeout_seconds=args.wait_timeout,
        replan=not args.no_replan,
        asynchrony=_asynchrony(args),
        ftpipehd=_ftpipehd(args),
    )
