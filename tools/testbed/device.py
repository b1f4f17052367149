"""One device of an emulated household: run commands on it, change it, break it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

from tools.testbed.cable import Cable
from tools.testbed.control_groups import Quota, control_group
from tools.testbed.household import DeviceDescription, check_cores, check_rate

_ONE_THREAD = 'OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"'


class EmulatedDevice:
    """A device of a testbed that is open.

    Args:
        description: what it is at first.
        cpu: the one it computes on.

    Attributes:
        cable: its place on the network.
        group: its processes.
        cores: its share of one core, as last set (also while `lift` is in force).
        memory_bytes: what its processes may use together; None: no limit.
        rate_mbit: of its cable, in each direction; None: no limit.
    """

    def __init__(self, description: DeviceDescription, cpu: int, cable: Cable) -> None:
        self._cpu = cpu
        self.name = description.name
        self.cable = cable
        self.group = control_group(f"p2ptrain-{cable.namespace}")
        self.cores = description.cores
        self.memory_bytes = description.memory_bytes
        self.rate_mbit = description.rate_mbit

    @property
    def address(self) -> str:
        """Its IPv4 address, inside its network namespace."""
        return self.cable.address

    def make(self) -> None:
        """Have its limits from now on; its cable is there."""
        self.group.make()
        self.limit()
        self.group.set_memory(self.memory_bytes)
        self.cable.set_rate(self.rate_mbit)

    # Running commands

    def prefix(self) -> list[str]:
        """What to put before a command to run it on this device.

        Torch's threads, which fill every CPU they see otherwise, are one unless the environment
        says something else.
        """
        enter = " && ".join(f"echo $$ > {folder}/cgroup.procs" for folder in self.group.folders())
        begin = f'{enter} && export {_ONE_THREAD} && exec taskset -c {self._cpu} "$@"'
        return [*self.cable.prefix(), "sh", "-c", begin, "--"]

    def adopt_this_process(self) -> None:
        """From now on the caller and what it starts have this device's share and memory."""
        for folder in self.group.folders():
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        os.sched_setaffinity(0, {self._cpu})

    def popen(self, argv: Sequence[str], **popen_arguments: Any) -> subprocess.Popen[Any]:
        """Start a command on this device; the arguments are those of `subprocess.Popen`."""
        return subprocess.Popen([*self.prefix(), *argv], **popen_arguments)

    # Changes while it runs

    def set_cores(self, cores: float) -> None:
        """Give it this share of one core. Raises HouseholdError."""
        check_cores(cores)
        self.cores = cores
        self.limit()

    def lift(self, cores: float = 1.0) -> None:
        """Give it a whole core for now, such as while it loads torch; or as much as is to spare."""
        self.group.set_quota(Quota.of_share(cores))

    def limit(self) -> None:
        """Hold it to its share again."""
        self.group.set_quota(Quota.of_share(self.cores))

    def set_memory(self, memory_bytes: int | None) -> None:
        """Limit its processes' memory; None: no limit.

        A process that asks for more is killed by the kernel (SIGKILL), as on a real device.

        Raises:
            TestbedError: more is in use already (control groups of version 1).
        """
        self.group.set_memory(memory_bytes)
        self.memory_bytes = memory_bytes

    def set_rate(self, mbit: float | None) -> None:
        """Set its cable's rate in each direction; None: no limit. What is queued stays queued.

        Raises:
            HouseholdError: no cable has that rate.
        """
        check_rate(mbit)
        self.cable.set_rate(mbit)
        self.rate_mbit = mbit

    # Misfortunes

    def kill(self) -> None:
        """SIGKILL to all its processes; returns when none is left. The device stays."""
        self.group.kill()

    def freeze(self) -> None:
        """All its processes stand still; nothing is closed, the kernel still acknowledges."""
        self.group.freeze()

    def thaw(self) -> None:
        """Undo `freeze`."""
        self.group.thaw()

    def unplug(self) -> None:
        """Pull its cable: packets are lost without a word to either side."""
        self.cable.unplug()

    def plug(self) -> None:
        """Undo `unplug`."""
        self.cable.plug()

    # What it has used

    def memory_bytes_now(self) -> int:
        """Memory in use, with the kernel's copies of files it has read."""
        return self.group.memory_bytes()

    def memory_peak_bytes(self) -> int:
        """The most that `memory_bytes_now` has been."""
        return self.group.memory_peak_bytes()

    def anonymous_bytes_now(self) -> int:
        """Memory in use that is no file's: heaps and stacks of its processes."""
        return self.group.anonymous_bytes()

    def cpu_seconds(self) -> float:
        """Processor time that its processes have used so far."""
        return self.group.cpu_seconds()

    def sent_bytes(self) -> int:
        """What it has sent so far, with Ethernet's headers."""
        return self.cable.sent_bytes()

    def received_bytes(self) -> int:
        """What it has received so far, with Ethernet's headers."""
        return self.cable.received_bytes()
