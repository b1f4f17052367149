"""One device that `tools/round_cost.py` measures: `p2ptrain` itself, with counters around it.

    python tools/round_cost_device.py FOLDER STAGES python -m p2ptrain ...

On SIGUSR1 it writes what it has spent so far into FOLDER, as `NAME.NUMBER.json`. STAGES is the plan
that is made whatever pays: the devices of each stage, such as "1,2", or "-" for the planner's own.
With ROUND_COST_PROFILE the event loop's thread
runs under cProfile, and `NAME.prof` is written at each signal.
"""

from __future__ import annotations

import cProfile
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PROFILE = "ROUND_COST_PROFILE"
"""Environment variable."""


class Counts:
    """Messages and bytes of parts that passed any link of this process, by kind."""

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.part_bytes: Counter[str] = Counter()

    def watch(self) -> None:
        """From now on."""
        from p2ptrain.net.link import Link

        link: Any = Link
        link._queued = self._counting(link._queued, "sent")
        link._deliver = self._counting(link._deliver, "received")

    def _counting(self, method: Callable[..., None], way: str) -> Callable[..., None]:
        def count(link: object, *arguments: Any) -> None:
            message = arguments[-1]
            name = f"{way} {message.kind} {message.fields.get('flow', '')}".rstrip()
            self.messages[name] += 1
            self.part_bytes[name] += message.parts_bytes
            method(link, *arguments)

        return count


class Yardsticks:
    """What this device's profile says that messages and bytes cost: wall seconds."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def watch(self) -> None:
        """From now on."""
        from p2ptrain.training import profiling

        measure: Any = profiling.measure_overheads

        def kept(*arguments: Any, **named: Any) -> Any:
            overheads = measure(*arguments, **named)
            self.found = overheads.to_json()
            return overheads

        module: Any = profiling
        module.measure_overheads = kept


def thread_seconds() -> dict[str, float]:
    """Processor time of the event loop's thread, of the computing one, and of all others."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent = dict.fromkeys(("loop", "compute", "other"), 0.0)
    for task in Path("/proc/self/task").iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue  # the thread has just ended
        name = names.get(int(task.name), "")
        is_loop = int(task.name) == os.getpid()
        kind = "loop" if is_loop else "compute" if name == "p2ptrain-compute" else "other"
        spent[kind] += nanoseconds / 1e9
    return spent


def forced(stages: str) -> Callable[..., Any]:
    """A planner's stand-in: these devices, equal shares, equal parts of the units."""
    from p2ptrain.plan.cluster import Cluster
    from p2ptrain.plan.profile import Profile
    from p2ptrain.plan.request import PlanRequest
    from tests.integration.training import group_plans

    counts = [int(stage) for stage in stages.split(",")]
    names = [f"device{number}" for number in range(sum(counts))]

    def make_plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Any:
        size = request.micro_batch or request.batch_size
        chosen = [group_plans.divided(*[size // count] * count) for count in counts]
        return group_plans.plan(chosen, profile, cluster, request, names=names)

    return make_plan


def main() -> None:
    """Be the device."""
    folder, stages = Path(sys.argv[1]), sys.argv[2]
    arguments = sys.argv[3:]
    name = arguments[arguments.index("--name") + 1]
    sys.argv = ["p2ptrain", *arguments[arguments.index("p2ptrain") + 1 :]]
    counts = Counts()
    counts.watch()
    yardsticks = Yardsticks()
    yardsticks.watch()
    profile = cProfile.Profile() if PROFILE in os.environ else None
    numbers = itertools.count()

    def tell(*_: object) -> None:
        if profile is not None:
            profile.disable()
            profile.dump_stats(folder / f"{name}.prof")
            profile.clear()
        file = folder / f"{name}.{next(numbers)}.json"
        told = {
            "at": time.monotonic(),
            "seconds": thread_seconds(),
            "messages": counts.messages,
            "part_bytes": counts.part_bytes,
            "yardsticks": yardsticks.found,
        }
        part = file.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.rename(file)
        if profile is not None:
            profile.enable()

    signal.signal(signal.SIGUSR1, tell)
    if stages != "-":
        from p2ptrain.training import household_plan

        household_plan.make_plan = forced(stages)
    from p2ptrain.__main__ import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()
