"""What is known of a running testbed, in /run, so that other terminals can find and change it.

    /run/p2ptrain-testbed/TAG/testbed.json      whose process it is, and the devices' order
    /run/p2ptrain-testbed/TAG/NAME.json         a device: where it is, and how it is set now

A device's file is the only place where its settings are kept: every change writes it, so
that `EmulatedDevice` in one process and `python -m tools.testbed set` in another agree.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.testbed.errors import TestbedError

FOLDER = Path("/run/p2ptrain-testbed")
_TESTBED = "testbed.json"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that opened a testbed.

    Attributes:
        started: its start by the kernel's count, as process ids are used again.
    """

    process: int
    started: int

    @classmethod
    def this_process(cls) -> Owner:
        """The caller."""
        return cls(os.getpid(), _started(os.getpid()))

    def is_alive(self) -> bool:
        """Whether it still runs."""
        try:
            return _started(self.process) == self.started
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class TestbedRecord:
    """A testbed: its household's name and its devices' names, in order."""

    __test__ = False  # for pytest: no test, for all its name

    tag: str
    household: str
    devices: tuple[str, ...]
    owner: Owner

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return FOLDER / self.tag

    def write(self) -> None:
        """Make it known."""
        self.folder.mkdir(parents=True)
        _replace(self.folder / _TESTBED, dataclasses.asdict(self))

    def remove(self) -> None:
        """Forget it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    def read(cls, folder: Path) -> TestbedRecord:
        """The testbed whose files are in `folder`. Raises OSError."""
        content = json.loads((folder / _TESTBED).read_text())
        owner = Owner(**content["owner"])
        return cls(content["tag"], content["household"], tuple(content["devices"]), owner)


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device: what stays as it is, then what may change.

    Attributes:
        number: of its cable.
        cpu: the one it computes on.
        group: its control group's name.
    """

    name: str
    tag: str
    number: int
    cpu: int
    group: str
    cores: float
    memory_bytes: int | None
    rate_mbit: float | None

    @property
    def file(self) -> Path:
        """Where this is kept."""
        return device_file(self.tag, self.name)

    def write(self) -> None:
        """Keep it."""
        _replace(self.file, dataclasses.asdict(self))

    @classmethod
    def read(cls, file: Path) -> DeviceRecord:
        """Raises TestbedError where the testbed has ended."""
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError as error:
            raise TestbedError(f"{file.stem}: its testbed has been closed") from error
        return cls(**content)


def device_file(tag: str, name: str) -> Path:
    """Where a device's record is kept."""
    return FOLDER / tag / f"{name}.json"


def known_testbeds() -> list[TestbedRecord]:
    """All testbeds of this machine, also those whose process has ended without closing them."""
    found = []
    for file in sorted(FOLDER.glob(f"*/{_TESTBED}")):
        try:
            found.append(TestbedRecord.read(file.parent))
        except FileNotFoundError:  # closed in this moment
            continue
    return found


def _replace(file: Path, content: object) -> None:
    """Write so that a reader sees the old content or the new one."""
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(content))
    fresh.replace(file)


def _started(process: int) -> int:
    """When a process began, in clock ticks after the machine's start (proc(5), field 22)."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19])
