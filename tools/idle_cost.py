"""What being a member costs a device that does nothing: messages, Python calls, processor time.

    python -m tools.idle_cost [--devices 5] [--seconds 5] [--profile]

The devices are meshes of one process and one event loop, over TLS on loopback; the figures are
divided by their number. Discovery is not among them.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from p2ptrain.aio import event_loop
from tests.support.mesh_household import Device, household


def messages(devices: list[Device]) -> int:
    """Sent so far by all."""
    links = [link for device in devices for link in device.mesh._connections._all_links]
    return sum(link.link.statistics().sent_messages for link in links)


async def run(count: int, seconds: float, profile: cProfile.Profile, folder: Path) -> None:
    """Start them, wait until they know each other, measure twice."""
    async with household(folder) as home:
        devices = [await home.start(f"device-{number}") for number in range(count)]
        names = {device.mesh.name for device in devices}
        for device in devices:
            await device.until(lambda device=device: device.alive() == names)
        await asyncio.sleep(1.0)  # news of each other goes round
        sent, begun = messages(devices), time.thread_time()
        await asyncio.sleep(seconds)
        share = (time.thread_time() - begun) / seconds / count
        rate = (messages(devices) - sent) / seconds / count
        sent = messages(devices)
        profile.enable()
        await asyncio.sleep(seconds)
        profile.disable()
        sent = messages(devices) - sent
        calls = cast(Any, pstats.Stats(profile)).total_calls
        print(
            f"{count} idle members, each: {rate:.1f} messages/s, {100 * share:.2f} % of a core, "
            f"{calls / seconds / count:.0f} calls/s, {calls / sent:.0f} for each message"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    arguments = parser.parse_args()
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as name:
        event_loop.run(run(arguments.devices, arguments.seconds, profile, Path(name)))
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(70)


if __name__ == "__main__":
    main()
