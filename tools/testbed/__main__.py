"""Emulated households from a terminal. Needs root, Linux.

    python -m tools.testbed B                           open household B until Ctrl-C
    python -m tools.testbed B [--device nx-2] -- COMMAND...     run a command on a device of it

and from other terminals, while one is open:

    python -m tools.testbed list
    python -m tools.testbed enter [--testbed TAG] nx-2 [COMMAND...]
    python -m tools.testbed set nx-2 --rate 10mbit --cores 0.1 --memory 512MiB
    python -m tools.testbed kill|freeze|thaw|unplug|plug nx-2

Where several are open, `--testbed TAG` (from `list`) says which.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from tools.testbed import quantities
from tools.testbed.device import EmulatedDevice
from tools.testbed.errors import TestbedError
from tools.testbed.household import Household, names
from tools.testbed.record import TestbedRecord, device_file, known_testbeds
from tools.testbed.testbed import Testbed

_MISFORTUNES: dict[str, Callable[[EmulatedDevice], None]] = {
    "kill": EmulatedDevice.kill,
    "freeze": EmulatedDevice.freeze,
    "thaw": EmulatedDevice.thaw,
    "unplug": EmulatedDevice.unplug,
    "plug": EmulatedDevice.plug,
}
_VERBS = {"enter", "set", *_MISFORTUNES}
_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say; returns the exit code."""
    own, command = _split(argv)
    try:
        if own[:1] == ["list"]:
            return _list()
        if own and own[0] in _VERBS:
            return _on_device(own, command)
        return _open(own, command)
    except (ValueError, TestbedError, PermissionError) as error:
        print(f"tools.testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the command after `--`."""
    if "--" not in argv:
        return list(argv), []
    border = list(argv).index("--")
    return list(argv[:border]), list(argv[border + 1 :])


def _open(own: list[str], command: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("household", help=f"a TOML file, or {', '.join(names())}")
    parser.add_argument("--device", help="where the command runs (default: the first)")
    arguments = parser.parse_args(own)
    household = Household.load(arguments.household)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # a shell's background jobs ignore it otherwise
    with Testbed(household) as testbed:
        if command:
            device = _named(testbed, arguments.device)
            return _run(device, command)
        print(f"{testbed.household.name} is open as {testbed.tag}; Ctrl-C closes it")
        _print_devices(testbed.devices)
        signal.pause()
    return 0


def _named(testbed: Testbed, name: str | None) -> EmulatedDevice:
    try:
        return testbed.devices[0] if name is None else testbed[name]
    except KeyError as error:
        raise TestbedError(f"no device {error.args[0]}") from error


def _run(device: EmulatedDevice, command: list[str]) -> int:
    """The command's exit code; Ctrl-C reaches it as well as us, and it ends first."""
    with device.popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


def _on_device(own: list[str], command: list[str]) -> int:
    """What is done to a device of a testbed that another terminal has opened."""
    verb, *words = own
    parser = argparse.ArgumentParser(prog=f"python -m tools.testbed {verb}")
    parser.add_argument("device")
    parser.add_argument("--testbed", help="its tag, where several are open")
    if verb == "enter":
        parser.add_argument("command", nargs=argparse.REMAINDER, help="default: a shell")
    if verb == "set":
        parser.add_argument("--cores", type=float, help="share of a core")
        parser.add_argument("--rate", type=_rate, help="of its cable, such as 10mbit")
        parser.add_argument("--memory", type=_memory, help="such as 512MiB")
    arguments = parser.parse_args(words)
    device = _find(arguments.device, arguments.testbed)
    if verb == "enter":
        wanted = [*arguments.command, *command] or [os.environ.get("SHELL", "/bin/sh")]
        return subprocess.call([*device.prefix(), *wanted])
    if verb == "set":
        _set(device, arguments)
    else:
        _MISFORTUNES[verb](device)
    return 0


def _set(device: EmulatedDevice, arguments: argparse.Namespace) -> None:
    if arguments.cores is not None:
        device.set_cores(arguments.cores)
    if arguments.rate is not None:
        device.set_rate(arguments.rate)
    if arguments.memory is not None:
        device.set_memory(arguments.memory)
    _print_devices([device])


def _rate(text: str) -> float:
    try:
        return quantities.mbit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _memory(text: str) -> int:
    try:
        return quantities.size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _list() -> int:
    for record in _open_testbeds():
        print(f"{record.household}, {record.tag}, opened by process {record.owner.process}")
        _print_devices([EmulatedDevice(device_file(record.tag, name)) for name in record.devices])
    return 0


def _open_testbeds() -> list[TestbedRecord]:
    return [record for record in known_testbeds() if record.owner.is_alive()]


def _find(name: str, tag: str | None) -> EmulatedDevice:
    """The device of that name. Raises TestbedError where none or several are open."""
    found = [
        record
        for record in _open_testbeds()
        if name in record.devices and tag in (None, record.tag)
    ]
    if not found:
        raise TestbedError(f"no open testbed has a device {name!r}; see: list")
    if len(found) > 1:
        tags = ", ".join(record.tag for record in found)
        raise TestbedError(f"several open testbeds have a device {name!r}: --testbed {tags}")
    return EmulatedDevice(device_file(found[0].tag, name))


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
