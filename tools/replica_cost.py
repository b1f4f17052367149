"""What copies of stages cost: the same run with and without them, in turn. Real processes.

    python tools/replica_cost.py --pairs 5 --seconds 18          3 stages on this machine
    python tools/replica_cost.py -o width=512 -o layers=12       a smaller model

One job runs all the time. In every second window nothing is kept; in the others versions are kept
as often as the cadence says. What is told of a pair is the samples a second with copies over those
without, and how much processor time of all three processes a version took: of their event loops, of
their compute threads, of all threads. The bar is 3.5 %, by the median of the pairs; the aim 1 %.
Exit code 1 if it is missed.

The model has 29.4 million parameters and is trained with momentum (`recovery_times_job.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2ptrain.cli.script import load_job
from p2ptrain.node import Node
from p2ptrain.observe.events import PlanEvent, Step
from p2ptrain.run import Run
from p2ptrain.training.kept_versions import KeptVersions
from p2ptrain.training.options import TrainOptions
from tests.system.household import Household

SCRIPT = Path(__file__).parent / "recovery_times_job.py"
CODE = "48151623"
WARM_UP_STEPS = 10
BAR, AIM = 0.035, 0.01


@dataclass
class Switch:
    """Turns copies off and on in the holder's process, and counts what became of them.

    Attributes:
        on: whether versions are kept.
        stable: versions that became whole.
        copies: the running job's account.
    """

    on: bool = True
    stable: int = 0
    copies: KeptVersions | None = None
    _begun: list[int] = field(default_factory=list)

    def install(self) -> None:
        """From now on, for every job of this process."""
        wants, keep_only, switch = KeptVersions.wants, KeptVersions.keep_only, self

        def switched(copies: KeptVersions, step: int) -> bool:
            switch.copies = copies
            if not switch.on:
                switch._begun.append(step)
                return False
            if switch._begun and copies._cadence is not None:
                # a window with copies begins as if one had just been kept
                copies._cadence._last_step = switch._begun[-1]
                switch._begun.clear()
            return wants(copies, step)

        def counted(copies: KeptVersions, *told: object) -> None:
            switch.stable += 1
            keep_only(copies, *told)  # type: ignore[arg-type]

        KeptVersions.wants = switched  # type: ignore[method-assign]
        KeptVersions.keep_only = counted  # type: ignore[assignment]

    @property
    def is_under_way(self) -> bool:
        """Whether a copy is on its way."""
        return self.copies is not None and bool(self.copies._keeping.under_way)


@dataclass(frozen=True)
class Processor:
    """Seconds of processor time, of all processes together: so far, or in a step."""

    loops: float
    compute: float
    all: float

    @classmethod
    def of(cls, pids: Sequence[int]) -> Processor:
        """So far. Ended threads count among `all`; the busiest one beside the loop computes."""
        loops = compute = total = 0.0
        for pid in pids:
            process = psutil.Process(pid)
            times, threads = process.cpu_times(), process.threads()
            spent = {thread.id: thread.user_time + thread.system_time for thread in threads}
            loops += spent.pop(pid)
            compute += max(spent.values(), default=0.0)
            total += times.user + times.system
        return cls(loops, compute, total)

    def since(self, before: Processor, steps: int) -> Processor:
        """A step's, from `before` until now."""
        return Processor(
            (self.loops - before.loops) / steps,
            (self.compute - before.compute) / steps,
            (self.all - before.all) / steps,
        )


@dataclass(frozen=True)
class Window:
    """What steps took in it, on average; `steps` of them."""

    steps: int
    seconds: float
    processor: Processor


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=18.0, help="of a window")
    parser.add_argument("-o", dest="options", action="append", default=[], help="of the job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        return 0 if asyncio.run(_measure(Path(folder), args)) else 1


async def _measure(folder: Path, args: argparse.Namespace) -> bool:
    switch = Switch()
    switch.install()
    settings = [(key, value) for key, _, value in (o.partition("=") for o in args.options)]
    job = load_job(str(SCRIPT), settings)
    own = ("--code", CODE, "--interface", "127.0.0.1", "--threads", "1")
    async with Household(folder) as household:
        members = [await household.start(name, "join", *own) for name in ("b", "c")]
        for member in members:
            await member.expect("ready", 60)
        node = Node(
            name="a",
            code=CODE,
            interfaces=("127.0.0.1",),
            state_dir=folder / "holder",
            threads=1,
            role="holder",
        )
        async with node:
            run = await node.train(job, TrainOptions(wait_for=3, planner="pp", replan=False))
            pids = [os.getpid(), *(member.pid for member in members)]
            ratios = await _pairs(run, switch, pids, args.pairs, args.seconds)
            await run.cancel()
    cost = 1 - statistics.median(ratios)
    spread = f"{1 - max(ratios):+.2%} to {1 - min(ratios):+.2%}"
    _say(
        f"cost {cost:+.2%} (median of {len(ratios)} pairs, {spread}); aim {AIM:.1%}, bar {BAR:.1%}"
    )
    return cost <= BAR


async def _pairs(
    run: Run, switch: Switch, pids: Sequence[int], count: int, seconds: float
) -> list[float]:
    await _steps(run, WARM_UP_STEPS)
    ratios = []
    for number in range(1, count + 1):
        # which comes first changes, so that a drift of the machine counts for both
        order = (True, False) if number % 2 else (False, True)
        windows: dict[bool, Window] = {}
        kept = switch.stable
        for on in order:
            switch.on = on
            while not on and switch.is_under_way:
                await _steps(run, 1)
            windows[on] = await _window(run, pids, seconds)
        ratios.append(windows[False].seconds / windows[True].seconds)
        _say_pair(number, windows, switch, switch.stable - kept)
    return ratios


def _say_pair(number: int, windows: dict[bool, Window], switch: Switch, stable: int) -> None:
    on, off = windows[True], windows[False]
    interval = switch.copies.seconds_between if switch.copies is not None else float("nan")
    more = [
        (getattr(on.processor, who) - getattr(off.processor, who)) * on.steps / max(stable, 1)
        for who in ("loops", "compute", "all")
    ]
    _say(
        f"{number:2}  a step takes {off.seconds:.4f} s without, {on.seconds:.4f} s with: "
        f"{off.seconds / on.seconds:.4f}; {stable} versions stable, one each {interval:.1f} s, "
        f"each {more[0]:.2f} + {more[1]:.2f} of {more[2]:.2f} processor s; "
        f"{off.processor.all / off.seconds:.2f} cores busy without"
    )


async def _window(run: Run, pids: Sequence[int], seconds: float) -> Window:
    """Of the steps that end within so long."""
    began, steps, now, before = monotonic(), 0, monotonic(), Processor.of(pids)
    while now - began < seconds:
        await _steps(run, 1)
        steps, now = steps + 1, monotonic()
    return Window(steps, (now - began) / steps, Processor.of(pids).since(before, steps))


async def _steps(run: Run, count: int) -> None:
    while count:
        event = await anext(run)
        if isinstance(event, PlanEvent):
            places = [f"{s.devices[0].name}: {s.units}" for s in event.stages]
            _say(f"stages {', '.join(places)}")
        count -= isinstance(event, Step)


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
