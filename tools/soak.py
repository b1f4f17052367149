"""Do a household's everyday events a great many times, and show what stays of them.

    python -m tools.soak                                every part, each in a process of its own
    python -m tools.soak --part recoveries --times 500

connects    a paired device dials another over TLS and hangs up; one process, loopback
elections   the coordinator ends, another is elected, and it comes back; cores, a virtual clock
recoveries  a device of a running job ends and the job continues without it, three times a job; then
            all are back for the next job; five devices in memory
jobs        one small job after the other on the same two members in memory

Memory (resident, after a full collection and malloc_trim), descriptors, tasks and threads are
looked at after the first tenth, when all caches are warm, and at the end. Exit code 1: memory grew
by more than 5%, or one of the others is higher than it was.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from p2ptrain.events import Event, Recovered, Step
from p2ptrain.mesh.links.handler_queues import HandlerQueues
from p2ptrain.recovery.cores.retry_policy import EARLY_STEPS

LARGEST_GROWTH = 0.05
TIMES = {"connects": 10_000, "elections": 1_000, "recoveries": 500, "jobs": 200}
"""By part."""
SETTLING_SECONDS = 5.0
_LANE = HandlerQueues._run.__qualname__
"""One for each kind of message of each device, from the first on: no more than there are kinds."""
_ENDING = ("e", "d", "c")
"""Of a job of five devices, in that order."""


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds now."""

    memory_bytes: int
    descriptors: int
    tasks: int
    threads: int
    by_task: Counter[str]

    @classmethod
    def now(cls) -> Held:
        """After everything that can be freed was."""
        for _ in range(3):  # what C++ held goes one collection after what held it
            gc.collect()
        with suppress(OSError, AttributeError):  # glibc's alone
            ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process()
        descriptors = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
        names = (getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
        by_task = Counter(name for name in names if name != _LANE)
        memory_bytes, threads = process.memory_info().rss, process.num_threads()
        return cls(memory_bytes, descriptors, by_task.total(), threads, by_task)

    def passed(self, before: Held) -> list[str]:
        """What is higher than it may be, in words."""
        growth = self.memory_bytes / before.memory_bytes - 1
        found = [f"memory {growth:+.1%}"] if growth > LARGEST_GROWTH else []
        for name in ("descriptors", "tasks", "threads"):
            was, now = getattr(before, name), getattr(self, name)
            if now > was:
                found.append(f"{name} {was} -> {now}")
        if self.tasks > before.tasks:
            more = (self.by_task - before.by_task).items()
            found += [f"{count} more of {name}" for name, count in more]
        return found

    def row(self, when: str) -> str:
        """For the table."""
        return (
            f"| {when} | {self.memory_bytes / 2**20:.1f} | {self.descriptors} | {self.tasks} "
            f"| {self.threads} |"
        )


async def connects() -> AsyncIterator[None]:
    """Each: a link from the handshake to its end, and the member has forgotten it."""
    from p2ptrain.mesh.identity.identity import load_or_create
    from p2ptrain.mesh.identity.state_folder import StateFolder
    from p2ptrain.net.link.link import Link
    from p2ptrain.net.transport.dial import dial
    from p2ptrain.net.transport.tls import client_context
    from tests.support.links import Inbox
    from tests.support.mesh_household import household

    with tempfile.TemporaryDirectory() as place:
        async with household(Path(place)) as home:
            anna = await home.start("anna")
            async with home.running("bert"):
                await anna.until(lambda: anna.alive() == {"anna", "bert"})
            await anna.until(lambda: anna.alive() == {"anna"})
            keys = load_or_create(StateFolder(Path(place) / "bert")).pem_file
            certificate = load_or_create(StateFolder(Path(place) / "anna")).certificate_der
            context = client_context(keys, [certificate])
            where = [("127.0.0.1", anna.mesh.port)]
            while True:
                link = await dial(
                    where, context, anna.mesh.self_id, lambda peer: Link(peer, Inbox())
                )
                link.close("enough")
                await link.closed
                yield


async def elections() -> AsyncIterator[None]:
    """Each: four devices lose their coordinator, elect another one, and get it back."""
    from tests.simulation.household import Household

    home = Household(seed=1, count=4)
    for device in home.devices:  # the simulator's invariants remember all that they have seen
        device.watch = device.on_judgement = lambda *_: None
    home.start_all()
    home.converge()
    while True:
        elected = home.running[0].election.coordinator
        assert elected is not None
        (ends,) = (device for device in home.devices if device.id == elected[0])
        ends.crash()
        home.converge()
        assert home.running[0].election.coordinator != elected
        ends.start()
        home.converge()
        yield


async def recoveries() -> AsyncIterator[None]:
    """Each: a device of a running job ends; what ended is back before the next job."""
    from tests.integration.training.household import devices
    from tests.integration.training.jobs import momentum_job, one_stage_each

    async with devices(2 + len(_ENDING)) as home:
        while True:
            deaths = _Deaths(home.mesh.kill)
            options = one_stage_each(2 + len(_ENDING))
            await home.holder_run(momentum_job(), options, deaths.hear).run()
            await asyncio.gather(*deaths.tasks)
            for name in _ENDING:
                await home.restart(name)
            await home.until_idle("b")
            home.waiting.clear()
            for _ in range(deaths.recovered):
                yield


class _Deaths:
    """Lets one device after the other end, each a few steps after the job continues.

    At once, it would look as if a part of the model ended them.
    """

    def __init__(self, kill: Callable[[str], Coroutine[None, None, None]]) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.recovered = self._steps = 0
        self._kill = kill

    def hear(self, event: Event) -> None:
        """What the job's holder says."""
        if isinstance(event, Recovered):
            self.recovered, self._steps = self.recovered + 1, 0
        self._steps += isinstance(event, Step)
        ended = len(self.tasks)
        if self._steps > EARLY_STEPS and self.recovered == ended < len(_ENDING):
            self.tasks.append(asyncio.create_task(self._kill(_ENDING[ended])))


async def jobs() -> AsyncIterator[None]:
    """Each: a job from its capture to its end."""
    from p2ptrain.job.train_options import TrainOptions
    from tests.integration.training.household import devices
    from tests.integration.training.jobs import make_job

    async with devices(2) as home:
        while True:
            await home.holder_run(make_job(epochs=1), TrainOptions(wait_for=2, planner="pp")).run()
            await home.until_idle("b")
            home.events.clear()
            yield


async def _settled(before: Held) -> Held:
    """What is held once what is under way has ended; only some seconds are waited for it."""
    until = time.monotonic() + SETTLING_SECONDS
    # nothing is reported of what ends here
    while (now := Held.now()).passed(before) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return now


PARTS = {part.__name__: part for part in (connects, elections, recoveries, jobs)}


async def soak(part: str, times: int) -> list[str]:
    """Do it so often; print what is held; return what is held too much."""
    begun, events = time.monotonic(), PARTS[part]()
    warm = max(times // 10, 1)
    try:
        for _ in range(warm):
            await anext(events)
        before = Held.now()
        print(before.row(f"{part}, after {warm:,}"), flush=True)
        for _ in range(times - warm):
            await anext(events)
        after = await _settled(before)
        print(after.row(f"{part}, after {times:,}, {time.monotonic() - begun:.0f} s"), flush=True)
        return after.passed(before)
    finally:
        await events.aclose()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--part", choices=PARTS, help="this one alone, in this process")
    parser.add_argument("--times", type=int, help="how often; by default as the parts' list says")
    options = parser.parse_args()
    if options.part is None:
        print("| when | memory MiB | descriptors | tasks | threads |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        command = [sys.executable, "-m", "tools.soak", "--part"]
        how = [] if options.times is None else ["--times", str(options.times)]
        return max(subprocess.run([*command, part, *how]).returncode for part in PARTS)
    passed = asyncio.run(soak(options.part, options.times or TIMES[options.part]))
    for what in passed:
        print(f"{options.part}: {what}", file=sys.stderr)
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
