"""Which versions of Python and torch p2ptrain works with, alone and mixed in one household.

    python tools/matrix.py --cells 3.11:2.9.1,3.13:2.15.0 --folder /var/tmp/matrix

For each cell: a virtual environment of that Python with that torch and otherwise the tested
versions, the unit tests in it, and a household of two devices in which the other one, which holds
the data, runs the Python and torch that this tool runs with. A mixed household is right where its
losses are those of `train --local` on the holder within `TOLERANCE`; kernels differ between
versions of torch. Prints a table in Markdown. Environments in the folder are used again.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from p2ptrain.demo.device_process import DeviceProcess  # noqa: E402

TOLERANCE = 1e-4
LIMIT_SECONDS = 300.0
SCRIPT = ROOT / "tests" / "system" / "jobs" / "small.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One environment."""

    python: str
    torch: str

    @classmethod
    def read(cls, words: str) -> Cell:
        """PYTHON:TORCH."""
        python, _, torch = words.partition(":")
        return cls(python, torch)

    def interpreter(self, folder: Path) -> Path:
        """Of the environment, which is made if need be. Raises subprocess.CalledProcessError."""
        place = folder / f"{self.python}-{self.torch}"
        interpreter = place / "bin" / "python"
        if not (place / "ok").exists():
            _run(f"python{self.python}", "-m", "venv", "--clear", str(place))
            constraints = folder / "constraints.txt"
            pins = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
            constraints.write_text("".join(pin for pin in pins if not pin.startswith("torch==")))
            wanted = (f"torch=={self.torch}", "-e", f"{ROOT}[test]")
            pip = (str(interpreter), "-m", "pip", "install", "--quiet")
            _run(*pip, "-c", str(constraints), *wanted)
            (place / "ok").touch()
        return interpreter


def _run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT)


def unit_tests(interpreter: Path) -> str:
    """The last line that pytest says; the tests that failed go to stderr."""
    command = (str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit")
    done = subprocess.run([*command, "-n", "2"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [f"ended with {done.returncode}"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line, file=sys.stderr)
    return re.sub(r"\s*\(.*\)|=", "", lines[-1]).strip()


async def losses(folder: Path, member: Path | None) -> list[float]:
    """Of every step, on this Python alone or with a member that runs `member`. Raises."""

    def own(name: str) -> tuple[str, ...]:
        state = str(folder / name)
        return ("--name", name, "--code", "24681357", "--state-dir", state, "--threads", "1")

    if member is None:
        return await _train(folder, "--local", "--state-dir", str(folder / "alone"))
    program = (str(member), "-m", "p2ptrain")
    other = await DeviceProcess.start(
        "member", ("join", *own("member")), program=program, environment=ENVIRONMENT
    )
    try:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(_read(other))
            found = await _train(folder, "--wait-for", "2", "--planner", "pp", *own("holder"))
            reading.cancel()
        return found
    finally:
        await other.stop()


async def _train(folder: Path, *arguments: str) -> list[float]:
    holder = await DeviceProcess.start(
        "holder", ("train", str(SCRIPT), *arguments), environment=ENVIRONMENT
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            found = [e["loss"] async for e in holder.events() if e["event"] == "step"]
        if await holder.wait() != 0:
            raise RuntimeError(holder.stderr[-1] if holder.stderr else "it said nothing")
        return found
    finally:
        await holder.stop()


async def _read(member: DeviceProcess) -> None:
    async for _ in member.events():
        pass


def mixed(interpreter: Path, reference: Sequence[float]) -> str:
    """Whether a household with a member of that environment trains as one device does."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = asyncio.run(losses(Path(folder), interpreter))
        except (RuntimeError, TimeoutError, ExceptionGroup) as error:
            return f"no: {error}"
    if len(found) != len(reference):
        return f"no: {len(found)} steps of {len(reference)}"
    far = max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))
    if far == 0:
        return "yes, same bits"
    return f"{'yes' if far <= TOLERANCE else 'no'}, losses within {far:.0e}"


def main() -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", required=True, help="PYTHON:TORCH, commas between")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "matrix")
    parser.add_argument("--skip-tests", action="store_true", help="mixed households alone")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        reference = asyncio.run(losses(Path(folder), None))
    import torch

    print(f"The holder: Python {platform.python_version()}, torch {torch.__version__}.\n")
    print("| Python | torch | unit tests | trains in one household with the holder |")
    print("|---|---|---|---|", flush=True)
    for cell in map(Cell.read, arguments.cells.split(",")):
        if shutil.which(f"python{cell.python}") is None:
            print(f"| {cell.python} | {cell.torch} | not tried: no such Python here | |")
            continue
        interpreter = cell.interpreter(arguments.folder)
        tests = "not run" if arguments.skip_tests else unit_tests(interpreter)
        result = mixed(interpreter, reference)
        print(f"| {cell.python} | {cell.torch} | {tests} | {result} |", flush=True)


if __name__ == "__main__":
    main()
