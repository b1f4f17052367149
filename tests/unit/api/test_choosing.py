"""A device is chosen before a member joins; checks are kept, and a driver may hang."""

import threading
from pathlib import Path

import pytest

from p2ptrain import events as ev
from p2ptrain.api.device_services import KeptChecks, choose_device
from p2ptrain.devices.check import CheckReport
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.probes import Accelerator, FamilyProbe
from p2ptrain.devices.processor import HOST
from p2ptrain.devices.request import DeviceRequest
from p2ptrain.devices.selection import DeviceChooser
from p2ptrain.errors import DeviceUnusable
from tests.unit.devices.test_choice import Fake, chooser

ONE = FamilyProbe((Accelerator("cuda:0", "Card", 12 * 10**9),), software="driver 1")


async def test_what_is_chosen_is_said_once_and_a_processor_alone_says_nothing() -> None:
    heard: list[ev.Event] = []
    chosen = await choose_device(DeviceRequest(), None, heard.append, chooser=chooser(cuda=ONE))
    reason = "Card, 11.0 of 12.0 GB free: used"
    assert (chosen.device.name, heard) == ("cuda:0", [ev.Device("cuda:0", "processor", reason)])
    heard.clear()
    for request in (DeviceRequest(), DeviceRequest("cpu")):
        quiet = await choose_device(request, None, heard.append, chooser=chooser())
        assert (quiet.device, heard) == (HOST, [])
    slow = chooser(CheckReport(speedup=0.5), cuda=ONE)
    await choose_device(DeviceRequest(), None, heard.append, chooser=slow)
    assert heard == [ev.Warning("Card: slower than this CPU, not used")]


async def test_a_driver_that_hangs_is_left_alone() -> None:
    ended = threading.Event()

    def hang() -> FamilyProbe:
        ended.wait()
        return ONE

    hanging = DeviceChooser(lambda device, software: CheckReport(), {"cuda": hang})
    heard: list[ev.Event] = []
    chosen = await choose_device(
        DeviceRequest(), None, heard.append, chooser=hanging, answer_seconds=0.01
    )
    assert chosen.device is HOST
    assert isinstance(heard[0], ev.Warning)
    with pytest.raises(DeviceUnusable, match="device cuda: no answer of it within"):
        await choose_device(
            DeviceRequest("cuda"), None, heard.append, chooser=hanging, answer_seconds=0.01
        )
    ended.set()


def test_a_check_is_kept_until_the_driver_or_the_card_is_another(tmp_path: Path) -> None:
    made: list[ComputeDevice] = []
    found = CheckReport({"conv2d": "NaN"}, ("linear",), {"linear": 1e-6}, 12.5)

    def check(device: ComputeDevice) -> CheckReport:
        made.append(device)
        return found

    folder = tmp_path / "state" / "accelerators"
    first, second = Fake("cuda:0"), Fake("cuda:0")
    second.kind = "another"
    assert KeptChecks(folder, check).report(first, "driver 1") == found
    assert KeptChecks(folder, check).report(first, "driver 1") == found
    assert len(made) == 1
    KeptChecks(folder, check).report(first, "driver 2")
    KeptChecks(folder, check).report(second, "driver 1")
    assert len(made) == 3
    for file in folder.iterdir():
        file.write_text("spoiled")
    assert KeptChecks(folder, check).report(first, "driver 1") == found
    assert KeptChecks(None, check).report(first, "driver 1") == found
    assert len(made) == 5
