"""A machine that goes to sleep, by a D-Bus of our own with a logind of our own on it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.manners.sleep import Logind, SleepWatch

dbus_fast = pytest.importorskip("dbus_fast", reason="NOT TESTED: dbus-fast is not installed")

CONFIGURATION = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={socket}</listen>
  <policy context="default">
    <allow send_destination="*"/><allow own="*"/><allow eavesdrop="true"/>
  </policy>
</busconfig>
"""


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a system's bus, empty."""
    program = shutil.which("dbus-daemon")
    if program is None:
        pytest.skip("NOT TESTED: there is no dbus-daemon here")
    socket, configuration = tmp_path / "bus", tmp_path / "bus.conf"
    configuration.write_text(CONFIGURATION.format(socket=socket))
    command = [program, f"--config-file={configuration}", "--nofork", "--print-address"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        address = daemon.stdout.readline().strip()
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
        yield address
        daemon.terminate()


async def test_logind_waits_until_the_member_has_left(bus: str) -> None:
    from dbus_fast.aio import MessageBus
    from dbus_fast.service import ServiceInterface, dbus_method, dbus_signal

    class Login(ServiceInterface):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("org.freedesktop.login1.Manager")
            self.asked: list[tuple[str, ...]] = []
            self.locks: list[int] = []
            self.is_asked = asyncio.Event()

        @dbus_method()
        def Inhibit(self, what: "s", who: "s", why: "s", mode: "s") -> "h":  # type: ignore[name-defined]  # noqa: F821, UP037
            self.asked.append((what, who, why, mode))
            kept, given = os.pipe()
            self.locks.append(kept)
            self.is_asked.set()
            return given

        @dbus_signal()
        def PrepareForSleep(self, begins: bool) -> "b":  # type: ignore[name-defined]  # noqa: F821, UP037
            return begins

    system = await MessageBus(bus_address=bus, negotiate_unix_fd=True).connect()
    login = Login()
    system.export("/org/freedesktop/login1", login)
    await system.request_name("org.freedesktop.login1")
    try:
        async with SleepWatch() as watch, asyncio.timeout(20.0):
            await login.is_asked.wait()
            assert login.asked == [("sleep", "p2ptrain", "leaves the household first", "delay")]
            login.PrepareForSleep(True)
            await watch.rejoin.wait()
            assert not watch.awake.is_set()
            watch.has_left()
            login.is_asked.clear()
            login.PrepareForSleep(False)
            await watch.awake.wait()
            await login.is_asked.wait()
            assert len(login.locks) == 2
    finally:
        system.disconnect()
        for lock in login.locks:
            os.close(lock)


@pytest.mark.usefixtures("bus")
async def test_without_logind_on_the_bus_only_the_clocks_tell() -> None:
    assert not await Logind().connect(lambda _begins: None)


async def test_without_a_bus_only_the_clocks_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nowhere")
    assert not await Logind().connect(lambda _begins: None)
