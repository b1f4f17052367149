"""How long a job stands still when the device with the data is killed and started again.

    python tools/holder_restart_times.py --kills 5      3 real processes on this machine

The same model as `tools/recovery_times.py`. Each time `train` is killed (SIGKILL) at a random
moment and started again at once. Told: when the others said that they wait, how long the new
process took until its model was captured, and from there to the next new step; bar for that: 10 s.
No step may be told twice. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.system.household import Device, Household

SCRIPT = str(Path(__file__).parent / "recovery_times_job.py")
CODE = "48151623"
START_SECONDS = 200.0
BAR_SECONDS = 10.0
CAPTURED = re.compile(r"captured_and_gathered.*seconds=([0-9.]+)")
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Restart:
    """One kill.

    Attributes:
        noticed_seconds: from the kill until all others had said that they wait.
        captured_seconds: from the new process' start as a member to its captured model.
        seconds: from there to its first new step.
        replayed: steps that were done again.
    """

    noticed_seconds: float
    captured_seconds: float
    seconds: float
    replayed: int


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--after", type=float, default=10.0, help="seconds of training before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="-o of the job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2p-") as folder:
        return 0 if asyncio.run(_measure(Path(folder), args)) else 1


async def _measure(folder: Path, args: argparse.Namespace) -> bool:
    chance = random.Random(args.seed)
    own = ("--code", CODE, "--interface", "127.0.0.1")
    options = [word for option in args.option for word in ("-o", option)]
    train = ("train", SCRIPT, *options, "--wait-for", "3", "--planner", "pp", "--debug", *own)
    found: list[Restart] = []
    told: list[int] = []
    async with Household(folder) as household:
        members = [await household.start(name, "join", *own) for name in ("b", "c")]
        holder = await household.start("a", *train)
        await holder.expect("step", START_SECONDS)
        while len(found) < args.kills:
            await asyncio.sleep(chance.uniform(0.5, 1.5) * args.after)
            seen = [len(member.said) for member in members]
            killed_at = monotonic()
            await holder.kill()
            for member, since in zip(members, seen, strict=True):
                await member.expect("waiting", since=since)
            noticed = monotonic() - killed_at
            told += _steps(holder)
            holder = await household.start("a", *train)
            found.append(await _restarted(holder, noticed))
            _say(f"{len(found):3}  {found[-1]}")
        told += _steps(holder)
        holder.interrupt()
        await holder.exit_code(60)
    missing = set(range(1, max(told) + 1)) - set(told)
    once = len(set(told)) == len(told) and told == sorted(told) and len(missing) <= args.kills
    worst = max(restart.seconds for restart in found)
    _say(f"at most {worst:.2f} s to the next new step; {len(missing)} of {max(told)} not told")
    return once and worst <= BAR_SECONDS


async def _restarted(holder: Device, noticed: float) -> Restart:
    deadline = monotonic() + START_SECONDS
    while (captured := CAPTURED.search(holder.stderr)) is None:
        if monotonic() > deadline:
            raise SystemExit(f"the model was not captured:\n{holder.stderr}")
        await asyncio.sleep(POLL_SECONDS)  # another process's log: nothing to wait on
    seconds = float(captured[1])
    event = await holder.expect("recovered", START_SECONDS)
    await holder.expect("step", START_SECONDS)
    return Restart(noticed, seconds, event["seconds"] - seconds, event["replayed_steps"])


def _steps(holder: Device) -> list[int]:
    return [event["step"] for event in holder.events("step")]


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
