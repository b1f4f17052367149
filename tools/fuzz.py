"""Throw damaged input at everything that p2ptrain decodes, and count what comes of it.

    python -m tools.fuzz                          every target, a million inputs each
    python -m tools.fuzz plan model --inputs 20000 --seed 2
    python -m tools.fuzz --no-atheris             without coverage: any Python, and faster

With atheris (`pip install -e '.[fuzz]'`) mutations follow what they reach. One process a target.
Printed of each: inputs, those accepted, the slowest in ms of computing with its size, growth of the
process in MiB, and every exception that is not p2ptrain's own, with its place. SIGTERM to a
target's process prints the row of what it has tried so far.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

WARM_UP = 500
"""Inputs before growth counts."""


class Tally:
    """What came of a target's inputs."""

    def __init__(
        self, decode: Callable[[bytes], object], own: tuple[type[BaseException], ...]
    ) -> None:
        self.inputs = self.accepted = 0
        self.slowest_ms, self.slowest_bytes = 0.0, 0
        self.foreign: Counter[str] = Counter()
        self._decode, self._own = decode, own
        self._warm_bytes = 0

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        begin = time.thread_time()
        try:
            self._decode(data)
            self.accepted += 1
        except self._own:
            pass
        except Exception as error:
            self.foreign[f"{type(error).__name__} {_place(error)}"] += 1
        took_ms = (time.thread_time() - begin) * 1e3
        self.inputs += 1
        if self.inputs == WARM_UP:
            self._warm_bytes = _resident_bytes()
        if self.inputs > WARM_UP and took_ms > self.slowest_ms:
            self.slowest_ms, self.slowest_bytes = took_ms, len(data)

    def row(self, name: str) -> str:
        """For the table."""
        growth_mib = (_resident_bytes() - self._warm_bytes) / 2**20 if self._warm_bytes else 0.0
        foreign = "; ".join(f"{what} ({n}x)" for what, n in self.foreign.most_common(5)) or "none"
        slowest = f"{self.slowest_ms:.1f} ({self.slowest_bytes:,})"
        return (
            f"| {name} | {self.inputs:,} | {self.accepted:,} | {slowest} | {growth_mib:.0f} "
            f"| {foreign} |"
        )


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "p2ptrain" in frame.filename] or list(frames)
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def fuzz(name: str, inputs: int, seed: int, *, atheris_wanted: bool) -> None:
    """Try one target in this process, print its row and end the process."""
    atheris = _atheris() if atheris_wanted else None
    if atheris is not None:
        with atheris.instrument_imports(include=["p2ptrain"]):
            from tools import fuzz_targets
    else:
        from tools import fuzz_targets

    target = fuzz_targets.targets()[name]
    tally, ended = Tally(target.decode, fuzz_targets.OWN_ERRORS), False

    def end(_signal: int, _frame: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)

    def one(data: bytes) -> None:
        tally(data)
        if tally.inputs >= inputs or ended:
            print(tally.row(name), flush=True)
            os._exit(0)

    dice = random.Random(seed)
    if atheris is None:
        while True:
            data = dice.choice(target.examples)
            for _ in range(dice.randint(1, 3)):
                data = fuzz_targets.mutated(data, dice)
            one(data)

    def mutate(data: bytes, most: int, drawn: int) -> bytes:
        dice = random.Random(drawn)
        if not data or dice.random() < 0.1:
            data = dice.choice(target.examples)
        if dice.random() < 0.5:
            return fuzz_targets.mutated(data, dice)[:most]
        return bytes(atheris.Mutate(data, most))

    flags = ["fuzz", f"-seed={seed}", "-max_len=1048576", "-rss_limit_mb=0", "-verbosity=0"]
    atheris.Setup(flags, one, custom_mutator=mutate)
    atheris.Fuzz()


def _atheris():  # type: ignore[no-untyped-def]
    try:
        import atheris
    except ImportError:
        return None
    return atheris


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", help="names; all by default")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-atheris", action="store_true", help="mutations without coverage")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        fuzz(args.targets[0], args.inputs, args.seed, atheris_wanted=True)
    names = args.targets
    if not names or args.no_atheris:
        from tools.fuzz_targets import targets

        names = names or list(targets())
    print("| decoder | inputs | accepted | slowest ms (bytes) | growth MiB | other errors |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in names:
        if args.no_atheris:  # nothing to instrument: what is loaded serves all
            if not (child := os.fork()):
                fuzz(name, args.inputs, args.seed, atheris_wanted=False)
            if os.waitpid(child, 0)[1]:
                print(f"| {name} | - | - | - | - | its process ended |", flush=True)
            continue
        limits = ["--inputs", str(args.inputs), "--seed", str(args.seed)]
        command = [sys.executable, "-m", "tools.fuzz", name, "--here", *limits]
        done = subprocess.run(command, capture_output=True, text=True)
        rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
        failed = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        print(rows[-1] if rows else f"| {name} | - | - | - | - | {failed[0]} |", flush=True)


if __name__ == "__main__":
    main()
