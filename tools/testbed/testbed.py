"""Opening and closing an emulated household.

    Testbed
    ├── Network            a namespace for the switch and one a device     (`ip netns`)
    ├── control groups     one a device (in version 1: one a hierarchy)    (/sys/fs/cgroup)
    ├── Metronome          keeps the shares exact
    └── records            what other terminals need                       (/run/p2ptrain-testbed)

All of it goes when the context ends, with every process inside, also after an error or Ctrl-C. A
testbed whose process was killed is removed by the next one that opens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Self

from tools.testbed.cable import Cable
from tools.testbed.control_groups import control_group
from tools.testbed.device import EmulatedDevice
from tools.testbed.errors import TestbedError
from tools.testbed.household import DeviceDescription, Household
from tools.testbed.metronome import Metronome
from tools.testbed.network import Network, remove_namespaces, switch_name
from tools.testbed.placement import places
from tools.testbed.record import DeviceRecord, Owner, TestbedRecord, known_testbeds

_NEEDED_COMMANDS = ("ip", "tc", "nsenter", "taskset")
_numbers = itertools.count()


class Testbed:
    """A household's devices, for as long as the context lasts.

    Raises:
        ValueError: this machine has too few CPUs for the household's shares.
        TestbedError: on entering, where this is not Linux, not root or lacks a command.

    Attributes:
        devices: in the household's order.
    """

    __test__ = False  # for pytest: no test, for all its name

    def __init__(self, household: Household) -> None:
        self.household = household
        self.devices: list[EmulatedDevice] = []
        self._tag = f"p2p{os.getpid()}x{next(_numbers)}t"
        self._closing = contextlib.ExitStack()

    @classmethod
    def of_shares(cls, shares: Sequence[float], rate: str | None = None) -> Testbed:
        """Devices `device0`, `device1` ... with these shares of a core, on equal cables."""
        return cls(Household.of_shares(shares, rate))

    def __enter__(self) -> Self:
        _check_machine()
        cpus = places([d.cores for d in self.household.devices], _own_cpus())
        remove_abandoned()
        record = self._record()
        with contextlib.ExitStack() as stack:
            stack.callback(_remove, record)
            record.write()
            stack.enter_context(Metronome(cpus))
            stack.enter_context(Network(len(cpus), tag=self._tag))
            self.devices = [
                self._make_device(number, description, cpu)
                for number, (description, cpu) in enumerate(
                    zip(self.household.devices, cpus, strict=True)
                )
            ]
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def __getitem__(self, name: str) -> EmulatedDevice:
        """The device of that name. Raises KeyError."""
        for device in self.devices:
            if device.name == name:
                return device
        raise KeyError(f"{name!r}: there are {', '.join(device.name for device in self.devices)}")

    @property
    def tag(self) -> str:
        """Its name among the testbeds on this machine."""
        return self._tag

    def _record(self) -> TestbedRecord:
        names = tuple(device.name for device in self.household.devices)
        return TestbedRecord(self._tag, self.household.name, names, Owner.this_process())

    def _make_device(self, number: int, description: DeviceDescription, cpu: int) -> EmulatedDevice:
        record = DeviceRecord(
            name=description.name,
            tag=self._tag,
            number=number,
            cpu=cpu,
            group=_group(self._tag, number),
            cores=description.cores,
            memory_bytes=description.memory_bytes,
            rate_mbit=description.rate_mbit,
        )
        control_group(record.group).make()
        record.write()
        device = EmulatedDevice(record.file)
        device.limit()
        device.set_memory(description.memory_bytes)
        device.set_rate(description.rate_mbit)
        return device


def remove_abandoned() -> list[str]:
    """Remove testbeds whose process was killed before it could; returns their tags."""
    abandoned = [record for record in known_testbeds() if not record.owner.is_alive()]
    for record in abandoned:
        _remove(record)
    return [record.tag for record in abandoned]


def _check_machine() -> None:
    if not sys.platform.startswith("linux"):
        raise TestbedError("an emulated household needs Linux (network namespaces, control groups)")
    if os.geteuid() != 0:
        raise TestbedError("an emulated household needs root (network namespaces): use sudo")
    missing = [command for command in _NEEDED_COMMANDS if shutil.which(command) is None]
    if missing:
        raise TestbedError(f"missing: {', '.join(missing)} (packages iproute2 and util-linux)")


def _own_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _group(tag: str, number: int) -> str:
    return f"p2ptrain-{tag}-{number}"


def _remove(record: TestbedRecord) -> None:
    """Every process, control group, namespace and file of a testbed, made or not yet."""
    with _undisturbed():
        numbers = range(len(record.devices))
        for number in numbers:
            control_group(_group(record.tag, number)).remove()
        switch = switch_name(record.tag)
        cables = [Cable(record.tag, switch, number) for number in numbers]
        remove_namespaces([*(cable.namespace for cable in cables), switch])
        record.remove()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C waits until the first one's cleaning up is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
