"""What other terminals learn of a testbed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from tools.testbed import record
from tools.testbed.errors import TestbedError
from tools.testbed.record import DeviceRecord, Owner, TestbedRecord, known_testbeds

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_testbed_is_found_until_it_is_removed() -> None:
    known = TestbedRecord("tag", "B", ("nx", "tx2"), Owner.this_process())
    known.write()
    assert known_testbeds() == [known]
    assert known.owner.is_alive()
    known.remove()
    assert known_testbeds() == []


def test_a_process_of_the_same_number_is_another_one() -> None:
    own = Owner.this_process()
    assert not dataclasses.replace(own, started=own.started - 1).is_alive()


def test_a_device_s_settings_are_what_was_written_last(folder: Path) -> None:
    (folder / "tag").mkdir()
    device = DeviceRecord("pi", "tag", 0, 1, "group", 0.3, None, 100.0)
    device.write()
    dataclasses.replace(device, cores=0.1).write()
    assert DeviceRecord.read(device.file).cores == 0.1
    assert [file.name for file in device.file.parent.iterdir()] == ["pi.json"]


def test_a_closed_testbed_s_device_is_an_error(folder: Path) -> None:
    with pytest.raises(TestbedError, match="pi: its testbed has been closed"):
        DeviceRecord.read(folder / "tag" / "pi.json")
