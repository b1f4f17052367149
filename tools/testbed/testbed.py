"""Opening and closing an emulated household.

    Testbed
    ├── Network            a namespace for the switch and one a device     (`ip netns`)
    ├── control groups     one a device (in version 1: one a hierarchy)    (/sys/fs/cgroup)
    └── Metronome          keeps the shares exact

All of it goes when the context ends, with every process inside, also after an error or Ctrl-C. A
testbed whose process was killed is removed by the next one that opens: its names say whose it is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from tools.testbed.control_groups import control_group
from tools.testbed.device import EmulatedDevice
from tools.testbed.errors import TestbedError
from tools.testbed.household import Household
from tools.testbed.metronome import Metronome
from tools.testbed.network import Network, remove_namespaces
from tools.testbed.placement import places

NAMESPACES = Path("/run/netns")

_NEEDED_COMMANDS = ("ip", "tc", "nsenter", "taskset")
_OURS = re.compile(r"p2p(\d+)s(\d+)x\d+t-(?:\d+|switch)")
_numbers = itertools.count()


class Testbed:
    """A household's devices, for as long as the context lasts.

    Raises:
        ValueError: this machine has too few CPUs for the household's shares.
        TestbedError: on entering, where this is not Linux, not root or lacks a command.

    Attributes:
        devices: in the household's order.
        tag: its name among the testbeds on this machine, once it is open.
    """

    __test__ = False  # for pytest: no test, for all its name

    def __init__(self, household: Household) -> None:
        self.household = household
        self.devices: list[EmulatedDevice] = []
        self.tag = ""
        self._closing = contextlib.ExitStack()

    @classmethod
    def of_shares(cls, shares: Sequence[float], rate: str | None = None) -> Testbed:
        """Devices `device0`, `device1` ... with these shares of a core, on equal cables."""
        return cls(Household.of_shares(shares, rate))

    def __enter__(self) -> Self:
        _check_machine()
        cpus = places([d.cores for d in self.household.devices], sorted(os.sched_getaffinity(0)))
        _remove_abandoned()
        process = os.getpid()
        self.tag = f"p2p{process}s{_started(process)}x{next(_numbers)}t"
        try:
            self._open(cpus)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with _undisturbed():
            self._closing.close()

    def __getitem__(self, name: str) -> EmulatedDevice:
        """The device of that name. Raises KeyError."""
        for device in self.devices:
            if device.name == name:
                return device
        raise KeyError(f"{name!r}: there are {', '.join(device.name for device in self.devices)}")

    def _open(self, cpus: Sequence[int]) -> None:
        closing = self._closing
        closing.enter_context(Metronome(cpus))
        network = closing.enter_context(Network(len(cpus), tag=self.tag))
        for description, cpu, cable in zip(
            self.household.devices, cpus, network.cables, strict=True
        ):
            device = EmulatedDevice(description, cpu, cable)
            closing.callback(device.group.remove)
            device.make()
            self.devices.append(device)


def _remove_abandoned() -> None:
    """Remove testbeds whose process was killed before it could."""
    with _undisturbed():
        for place in sorted(NAMESPACES.glob("p2p*")):
            found = _OURS.fullmatch(place.name)
            if found is not None and not _runs(int(found[1]), int(found[2])):
                control_group(f"p2ptrain-{place.name}").remove()
                remove_namespaces([place.name])


def _runs(process: int, started: int) -> bool:
    """Whether it still does; process ids are used again."""
    try:
        return _started(process) == started
    except OSError:
        return False


def _started(process: int) -> int:
    """When a process began, in clock ticks after the machine's start (proc(5), field 22)."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19])


def _check_machine() -> None:
    if not sys.platform.startswith("linux"):
        raise TestbedError("an emulated household needs Linux (network namespaces, control groups)")
    if os.geteuid() != 0:
        raise TestbedError("an emulated household needs root (network namespaces): use sudo")
    missing = [command for command in _NEEDED_COMMANDS if shutil.which(command) is None]
    if missing:
        raise TestbedError(f"missing: {', '.join(missing)} (packages iproute2 and util-linux)")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C waits until the first one's cleaning up is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
