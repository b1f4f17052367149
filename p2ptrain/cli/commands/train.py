"""`p2ptrain train`: this device holds the data and the script, the household trains."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain import events
from p2ptrain.aio import event_loop
from p2ptrain.api.loading import collector_at_rest, load_training
from p2ptrain.api.sinks import asked_sinks
from p2ptrain.cli import arguments
from p2ptrain.cli.commands.train_arguments import (
    NEW_FILES,
    add_experimental,
    add_files,
    add_household,
    add_overrides,
    check_for_torch,
    check_options,
    override,
    train_options,
)
from p2ptrain.cli.more_members import MoreMembers
from p2ptrain.cli.output import Output, silence_stdout
from p2ptrain.cli.script import load_job
from p2ptrain.cli.signals import sigterm_interrupts
from p2ptrain.cli.usage import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG_USAGE,
    Command,
    Interrupted,
    Options,
    UsageError,
)
from p2ptrain.errors import RunCancelled
from p2ptrain.events import Event, Step, Stopped

if TYPE_CHECKING:
    from p2ptrain.cli.live import LiveRenderer
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions
    from p2ptrain.page.server import PageServer

_DESCRIPTION = """\
Trains the model that SCRIPT's job() returns, on all devices of the household. This device has
the data. It waits for N devices (itself included), measures them, plans the work, trains and
writes the weights. The other devices need no script, no data and no copy of the model. --local
trains on this device alone, to compare loss and speed. Inside torchrun, --engine torch trains
the same job on torch.distributed instead, with no household."""

_EXAMPLE = """\
  p2ptrain train digits.py --wait-for 3 --out digits.safetensors
  p2ptrain train digits.py -o hidden=128 --epochs 2 --local
  torchrun --nproc-per-node 3 -m p2ptrain train digits.py --engine torch"""


def _options(own: Options) -> None:
    arguments.add_script_options(own)
    add_household(own.group("who trains"))
    add_overrides(own.group("instead of what the script's Job says"))
    add_files(own.group("files"))
    arguments.add_node(own)


def run(args: argparse.Namespace, output: Output) -> int:
    """Train; returns when the weights are written."""
    if args.engine == "torch":
        return _train_ranked(args, output)
    check_options(args)
    arguments.find_code(args)
    job, chosen = _loaded(args)
    asked_sinks(job, chosen)  # one that is not installed is refused before anybody is asked to help
    steps = job.total_steps(args.steps)
    live = None if chosen.dry_run else output.show_live(type(job.model).__name__, steps)
    shown = _Shown(output)
    with sigterm_interrupts() as interrupt:
        output.writer.on_closed = interrupt
        try:
            if args.local:
                _train_here(job, chosen, args, shown, live)
            else:
                event_loop.run(_train(job, chosen, args, output, shown, live))
        except (KeyboardInterrupt, RunCancelled) as error:  # by a signal, or on the page
            raise Interrupted(_stopped_at(shown.step, steps, args)) from error
    return DONE


def _stopped_at(step: int, steps: int | None, args: argparse.Namespace) -> str:
    """Of `--out` the trainer itself has said whether it was written."""
    where = f"Stopped at step {step:,}{'' if steps is None else f' of {steps:,}'}."
    if args.checkpoint is not None:
        last = f"To go on from the last checkpoint, if there is one yet: --resume {args.checkpoint}"
        return f"{where} {last}"
    kept = "No weights were saved: use" if args.out is None else "Use"
    return f"{where} {kept} --checkpoint DIR to be able to go on."


LOOK_SECONDS = 1.0


def _loaded(args: argparse.Namespace) -> tuple[Job, TrainOptions]:
    """The script's job, and how to run it.

    Paths are meant in the folder in which the command began, which a script may leave.
    """
    here = Path.cwd()
    with collector_at_rest():
        job = override(load_job(args.script, args.job_options), args)
    if Path.cwd() != here:
        for name in (*NEW_FILES, "resume", "plan", "log_dir"):
            if getattr(args, name) is not None:
                setattr(args, name, here / getattr(args, name))
    return job, train_options(args)


def _train_ranked(args: argparse.Namespace, output: Output) -> int:
    """Inside torchrun: what there is to say, rank 0 says."""
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        check_for_torch(args)
    except UsageError:
        if is_first:
            raise
        threading.Event().wait(_LAST_SECONDS)  # torchrun ends all ranks as soon as one ends
        return WRONG_USAGE
    if not is_first:
        silence_stdout()
    from p2ptrain.api.train import train_on_ranks
    from p2ptrain.torch_engine.ranks import Ranks

    ranks, exit_code, shown = Ranks.of_torchrun(), FAILED, _Shown(output)
    steps = None
    try:
        with sigterm_interrupts() as interrupt:
            output.writer.on_closed = interrupt
            with ranks.together():
                job, chosen = _loaded(args)
                steps = job.total_steps(args.steps)
            if ranks.is_first:
                output.show_live(type(job.model).__name__, steps)
            node = {"state_dir": args.state_dir, "threads": args.threads, "device": args.device[0]}
            event_loop.run(train_on_ranks(ranks, job, chosen, shown, **node))
        exit_code = DONE
    except (KeyboardInterrupt, RunCancelled) as error:
        exit_code = INTERRUPTED
        if is_first:
            raise Interrupted(_stopped_at(shown.step, steps, args)) from error
    except Exception:
        if is_first or args.debug:
            raise
    finally:
        ranks.leave(failed=exit_code != DONE)
    return exit_code


_LAST_SECONDS = 10.0


def _train_here(
    job: Job,
    chosen: TrainOptions,
    args: argparse.Namespace,
    shown: _Shown,
    live: LiveRenderer | None,
) -> None:
    from p2ptrain.api.train import train_alone

    node_options = {
        "state_dir": arguments.state_dir_of(args),
        "memory_bytes": args.memory,
        "threads": args.threads,
        "device": args.device[0],
    }
    on_limit = None if live is None else live.limited
    event_loop.run(train_alone(job, chosen, shown, node_options, on_limit))


async def _train(
    job: Job,
    chosen: TrainOptions,
    args: argparse.Namespace,
    output: Output,
    shown: _Shown,
    live: LiveRenderer | None,
) -> None:
    from p2ptrain.api.node import Node
    from p2ptrain.control.lease import Lender
    from p2ptrain.control.server import ControlServer
    from p2ptrain.photos.server import PhotoPage

    await load_training(exporting=True)
    node_options = arguments.node_options(args)
    folder = node_options["state_dir"]
    async with (
        MoreMembers(args.device[1:], node_options, output) as more,
        Node(**node_options, role="holder", on_event=more.seen_by(shown)) as node,
    ):
        more.invites_by(node.invite)
        lender = Lender(node, keeps=True)
        async with ControlServer(folder, lender), PhotoPage(folder, node) as page:
            lender.page = page
            run = await node.train(job, chosen)
            looking = None if live is None else asyncio.create_task(_look(page, live))
            try:
                await run.result()
            finally:
                if live is not None and looking is not None:
                    looking.cancel()
                    live.state = await page.state()


async def _look(page: PageServer, live: LiveRenderer) -> None:
    """What the page would show, for the terminal."""
    while True:
        live.state = await page.state()
        await asyncio.sleep(LOOK_SECONDS)


class _Shown:
    """Shows what happens; how the command ends is said by the command itself.

    Attributes:
        step: the last one that was reported.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self.step = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            self.step = event.step
        if not isinstance(event, Stopped | events.Error):
            self._output.show(event)


COMMAND = Command(
    *("train", run, "train a script's model with the household"),
    *(_DESCRIPTION, _EXAMPLE, _options),
    experimental=add_experimental,
)
