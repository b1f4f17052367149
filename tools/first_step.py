"""How long from `p2ptrain train` to the first step, on an emulated household. Needs root, Linux.

    python tools/first_step.py --shares 0.8,0.2,0.2,0.2,0.2 --rate 100mbit

The members are up, paired and idle before `train` starts; every device has its own network
namespace, its share of a core and a cable of the given rate. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.system.household import Device, Household  # noqa: E402
from tools.testbed import Testbed  # noqa: E402

CODE = "24681357"
START_SECONDS = 180.0


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Start the members, then `train`, and note when it says what."""
    shares = [float(share) for share in arguments.shares.split(",")]
    names = [f"device{number}" for number in range(len(shares))]
    with Testbed.of_shares(shares, arguments.rate) as testbed:
        prefixes = {device.name: device.prefix() for device in testbed.devices}
        async with Household(folder, prefixes) as household:
            await _members_up(household, names)
            return await _train(household, names, arguments)


async def _members_up(household: Household, names: list[str]) -> None:
    """All but the holder, which has been paired and has left again."""
    devices = [await household.start(name, "join", "--code", CODE) for name in names]
    for device in devices:
        for name in names:
            if name != device.name:
                await device.expect("member", START_SECONDS, name=name, state="alive")
    devices[0].terminate()
    await devices[0].exit_code()


async def _train(
    household: Household, names: list[str], arguments: argparse.Namespace
) -> dict[str, object]:
    job = str(ROOT / "tools" / "first_step_job.py")
    started = monotonic()
    holder = await household.start(
        names[0],
        "train",
        job,
        *("--wait-for", str(len(names)), "--steps", str(arguments.steps)),
        *("--planner", arguments.planner),
    )
    times = {}
    for kind in ("ready", "plan", "step"):
        await holder.expect(kind, START_SECONDS)
        times[kind] = round(monotonic() - started, 2)
    await holder.succeed(START_SECONDS)
    return {"seconds_to": times, **_summary(holder)}


def _summary(holder: Device) -> dict[str, object]:
    plan = holder.events("plan")[0]
    done = holder.events("done")[0]
    return {
        "stages": [[s["units"], s["devices"][0]["name"]] for s in plan["stages"]],
        "left_out": plan["left_out"],
        "micro_batch": plan["micro_batch"],
        "predicted_samples_per_s": round(plan["predicted_samples_per_s"], 1),
        "samples_per_s": round(done["samples_per_s"], 1),
        "seconds_of_steps": [round(step["seconds"], 3) for step in holder.events("step")],
    }


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", default="0.8,0.2,0.2,0.2,0.2", help="cores, the holder's first")
    parser.add_argument("--rate", default="100mbit", help="of every cable, as tc writes it")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--planner", default="auto")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(arguments, Path(folder))), indent=1))


if __name__ == "__main__":
    main()
