"""Emulated households from a terminal. Needs root, Linux.

python -m tools.testbed B                           open household B until Ctrl-C
python -m tools.testbed B [--device nx-2] -- COMMAND...     run a command on a device of it
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from tools.testbed.device import EmulatedDevice
from tools.testbed.errors import TestbedError
from tools.testbed.household import Household, names
from tools.testbed.testbed import Testbed

_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("household", help=f"a TOML file, or {', '.join(names())}")
    parser.add_argument("--device", help="where the command runs (default: the first)")
    border = argv.index("--") if "--" in argv else len(argv)
    arguments, command = parser.parse_args(argv[:border]), argv[border + 1 :]
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # a shell's background jobs ignore it otherwise
    try:
        with Testbed(Household.load(arguments.household)) as testbed:
            if command:
                return _run(_named(testbed, arguments.device), command)
            print(f"{testbed.household.name} is open as {testbed.tag}; Ctrl-C closes it")
            _print_devices(testbed.devices)
            signal.pause()
    except (ValueError, TestbedError, PermissionError) as error:
        print(f"tools.testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _named(testbed: Testbed, name: str | None) -> EmulatedDevice:
    try:
        return testbed.devices[0] if name is None else testbed[name]
    except KeyError as error:
        raise TestbedError(f"no device {error.args[0]}") from error


def _run(device: EmulatedDevice, command: Sequence[str]) -> int:
    """The command's exit code; Ctrl-C reaches it as well as us, and it ends first."""
    with device.popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


def _print_devices(devices: Sequence[EmulatedDevice]) -> None:
    for device in devices:
        memory = "any" if device.memory_bytes is None else f"{device.memory_bytes / 2**20:.0f} MiB"
        rate = "any" if device.rate_mbit is None else f"{device.rate_mbit:g} Mbit/s"
        print(
            f"  {device.name:12} {device.address:12} {device.cores:5.3f} core  {memory:>9}  {rate}",
            flush=True,
        )


def _interrupt(_number: int, _frame: object) -> None:
    """SIGTERM ends us as Ctrl-C does, so that nothing stays behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
