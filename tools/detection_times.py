"""How soon real devices miss each other: python -m tools.detection_times kill freeze --members 3 8

    kill      SIGKILL; bar: every survivor's verdict within 250 ms (p99)
    freeze    SIGSTOP; bar: within 5 s (p99)
    cable     the member's cable is pulled (network namespaces, as root); the same bar
    busy      freezes of the event loop or of the interpreter, 0.1 to 2 s long, at up to half of the
              members at a time, all of them under full load; bar: none is declared dead

The members are processes with the program's own mesh over TLS on loopback, each stamping what it
says with the machine's monotonic clock. `busy --without-health` shows what the rules of local
health are good for. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

from tools.detection.member import Settings
from tools.detection.members import Members, Place
from tools.detection.trials import Failure, Found, measure, measure_freezes, quantile
from tools.testbed.network import Network

LOOPBACK = Place("127.0.0.1")
BARS_SECONDS = {Failure.KILL: 0.25, Failure.FREEZE: 5.0, Failure.CABLE: 5.0}
ELECTED_BAR_SECONDS = 3.0


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    kinds = [*(str(failure) for failure in Failure), "busy"]
    parser.add_argument("kinds", nargs="+", choices=kinds)
    parser.add_argument("--members", nargs="+", type=int, default=[4], help="household sizes")
    parser.add_argument("--trials", type=int, default=100, help="of each kind and size")
    parser.add_argument("--households", type=int, default=1, help="at once; they share the trials")
    parser.add_argument("--seconds", type=float, default=200.0, help="most for a kind and size")
    parser.add_argument("--load", choices=("", "hash", "torch"), default="", help="of each member")
    parser.add_argument("--rate", type=float, default=20.0, help="Mbit/s of cables")
    parser.add_argument("--without-health", action="store_true", help="switch local health off")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    good = True
    for size in options.members:
        for kind in options.kinds:
            good &= asyncio.run(_measure_kind(kind, size, options))
    return 0 if good else 1


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


async def _measure_kind(kind: str, size: int, options: argparse.Namespace) -> bool:
    deadline = time.monotonic() + options.seconds
    rng = Random(f"{options.seed} {kind} {size}")
    found = Found()
    freezes = list[tuple[int, list[str]]]()
    share = -(-options.trials // options.households)

    async def household(seed: int) -> None:
        own = Random(seed)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            places, cable = [LOOPBACK], None
            if kind == Failure.CABLE:
                network = stack.enter_context(Network(size, f"{options.rate}mbit"))
                places = [Place(network.address(i), tuple(network.prefix(i))) for i in range(size)]
                cable = partial(_set_cable, network)
            settings = Settings(local_health=not options.without_health, load=options.load)
            async with Members(folder, size, places, settings) as members:
                if kind == "busy":
                    freezes.append(await measure_freezes(members, own, share, deadline))
                else:
                    failure = Failure(kind)
                    await measure(members, failure, own, share, deadline, found, cable)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.households):
            group.create_task(household(rng.getrandbits(32)))
    if kind == "busy":
        return _show_freezes(size, freezes, options)
    return _show(Failure(kind), size, found)


def _set_cable(network: Network, name: str, plugged: bool) -> None:
    change = network.plug_cable if plugged else network.pull_cable
    change(ord(name) - ord("a"))


def _show(failure: Failure, size: int, found: Found) -> bool:
    print(f"{failure}, {size} members, {len(found.last)} trials, {len(found.wrong)} others dead")
    for words, values in (
        ("first verdict", found.first),
        ("each verdict", found.verdicts),
        ("last verdict", found.last),
        ("new coordinator after the first verdict", found.elected),
    ):
        if values:
            print(f"  {words:40} {spread(values)}")
    print("\n".join(f"  {line}" for line in found.wrong))
    late = max(found.elected, default=0.0) > ELECTED_BAR_SECONDS
    return quantile(found.verdicts, 0.99) <= BARS_SECONDS[failure] and not found.wrong and not late


def _show_freezes(
    size: int, freezes: list[tuple[int, list[str]]], options: argparse.Namespace
) -> bool:
    count, deaths = sum(n for n, _ in freezes), [d for _, wrong in freezes for d in wrong]
    rule = "without" if options.without_health else "with"
    load = options.load or "no"
    print(f"busy, {size} members, {load} load, {rule} local health: {count} freezes,", end=" ")
    print(f"{len(deaths)} false deaths")
    print("\n".join(f"  {line}" for line in deaths[:20]))
    return bool(deaths) == options.without_health


def spread(seconds: list[float]) -> str:
    """Median and tail, in milliseconds."""
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    return "  ".join(f"{name} {1000 * quantile(seconds, share):7.1f} ms" for name, share in shares)


if __name__ == "__main__":
    sys.exit(main())
