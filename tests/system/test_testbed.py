"""An emulated household is what it says: shares, rates, memory, misfortunes, and nothing left."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.system import full_load
from tools.testbed import EmulatedDevice, Household, Testbed
from tools.testbed.control_groups import ROOT
from tools.testbed.testbed import NAMESPACES

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.household,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("emulation"),
]

MIB = 2**20
ROOT_FOLDER = Path(__file__).parents[2]
HOME = Household.parse(
    "home",
    """
    rate = "100mbit"
    memory = "256MiB"
    [[device]]
    name = "laptop"
    cores = 0.4
    [[device]]
    name = "pi"
    count = 2
    cores = 0.2
    """,
)
SPIN = ["sh", "-c", "while :; do :; done"]


@pytest.fixture
def home() -> Iterator[Testbed]:
    with Testbed(HOME) as testbed:
        yield testbed


def _cores_used(device: EmulatedDevice, seconds: float) -> float:
    """Over the next so many seconds."""
    used, began = device.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return (device.cpu_seconds() - used) / (time.monotonic() - began)


def _sent_mbit(device: EmulatedDevice, seconds: float) -> float:
    """Over the next so many seconds."""
    sent, began = device.sent_bytes(), time.monotonic()
    time.sleep(seconds)
    return 8e-6 * (device.sent_bytes() - sent) / (time.monotonic() - began)


HANG_SECONDS = 60.0
"""A machine that tests may have other work for long, and devices less than their share."""


def _uses(device: EmulatedDevice, cores: float) -> bool:
    """Whether it uses its share now; at no time more."""
    used = _cores_used(device, 0.5)
    assert used < 1.1 * cores
    return used > 0.6 * cores


def _until(reached: Callable[[], bool], words: str) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not reached():
        assert time.monotonic() < deadline, words
        time.sleep(0.01)  # counters of the kernel: there is no event to wait for


def test_all_devices_get_their_share_and_their_rate_at_once(home: Testbed) -> None:
    def at_once() -> bool:
        rows = full_load.measure(home, 1.5, traffic=True)
        for row in rows:
            assert row.given < 1.1 * row.cores, rows
            assert max(row.sent_mbit, row.received_mbit) < 105, rows
        least = min(min(row.sent_mbit, row.received_mbit) for row in rows)
        return least > 60 and all(row.given > 0.6 * row.cores for row in rows)

    _until(at_once, "all have what is theirs")


def test_shares_and_rates_change_while_commands_run(home: Testbed) -> None:
    laptop, pi = home["laptop"], home["pi-1"]
    with full_load.running(pi, "receive"), full_load.running(laptop, "send", pi.address):
        pi.set_rate(10)
        assert (pi.rate_mbit, laptop.rate_mbit) == (10, 100)
        _until(lambda: _sent_mbit(laptop, 0.3) < 13, "a slower cable at the other end holds it up")
        pi.set_rate(1000)
        laptop.set_rate(400)
        _until(lambda: _sent_mbit(laptop, 0.3) > 150, "a faster cable carries more")
    process = laptop.popen(SPIN)
    try:
        for cores in (0.1, 0.4):
            laptop.set_cores(cores)
            _until(partial(_uses, laptop, cores), f"it uses {cores}")
        laptop.lift()
        _until(lambda: _cores_used(laptop, 0.3) > 0.45, "a device without limit takes more")
        assert laptop.cores == 0.4
        laptop.limit()
        _until(partial(_uses, laptop, 0.4), "it uses its share again")
    finally:
        process.kill()
        process.wait()


def test_nothing_stays_in_the_queue_of_a_cable_that_becomes_slower(home: Testbed) -> None:
    laptop, pi = home["laptop"], home["pi-1"]
    with full_load.running(pi, "receive"), full_load.running(laptop, "send", pi.address):
        for _ in range(3):
            _until(lambda: _sent_mbit(laptop, 0.1) > 50, "it sends, and more waits")
            laptop.set_rate(1)
            _until(lambda: 0.1 < _sent_mbit(laptop, 1.0) < 1.3, "what waited goes on, slowly")
            laptop.set_rate(100)


def test_who_takes_more_memory_than_there_is_is_killed(home: Testbed) -> None:
    pi = home["pi-1"]
    take = [sys.executable, "-c", f"x = b'x' * {150 * MIB}; print('taken')"]
    assert pi.popen(take, stdout=subprocess.DEVNULL).wait() == 0
    assert 150 * MIB < pi.memory_peak_bytes() < 256 * MIB
    pi.set_memory(100 * MIB)
    assert pi.popen(take, stdout=subprocess.DEVNULL).wait() == -9
    assert pi.memory_bytes_now() < 100 * MIB
    pi.set_memory(None)
    assert pi.memory_bytes is None
    assert pi.popen(take, stdout=subprocess.DEVNULL).wait() == 0


def test_a_pulled_cable_breaks_no_connection(home: Testbed) -> None:
    laptop, pi = home["laptop"], home["pi-1"]
    with (
        full_load.running(pi, "receive") as receiver,
        full_load.running(laptop, "send", pi.address) as sender,
    ):
        pi.unplug()
        _until(lambda: _sent_mbit(laptop, 0.1) < 1, "nothing is acknowledged any more")
        pi.plug()
        _until(lambda: _sent_mbit(laptop, 0.1) > 50, "the same connection goes on")
        assert sender.poll() is None
        assert receiver.poll() is None


def test_frozen_devices_stand_still_and_killed_ones_are_empty(home: Testbed) -> None:
    laptop = home["laptop"]
    process = laptop.popen(["sh", "-c", "while :; do :; done & while :; do :; done"])
    _until(lambda: laptop.cpu_seconds() > 0.1, "it runs")
    laptop.freeze()
    assert _cores_used(laptop, 0.2) == 0
    laptop.thaw()
    _until(lambda: _cores_used(laptop, 0.5) > 0.2, "it runs on")
    laptop.freeze()
    laptop.kill()
    assert process.wait(timeout=HANG_SECONDS) == -9
    assert _cores_used(laptop, 0.1) == 0
    assert laptop.popen(["true"]).wait() == 0


def _left(tag: str) -> set[str]:
    places = (NAMESPACES, ROOT / "cpu", ROOT / "memory", ROOT)
    names = (file.name for place in places if place.exists() for file in place.iterdir())
    return {name for name in names if tag in name}


def test_nothing_is_left_after_an_error() -> None:
    def fail() -> None:
        with testbed:
            running.append(testbed["pi-2"].popen(SPIN))
            _until(lambda: testbed["pi-2"].cpu_seconds() > 0.05, "it runs")
            assert _left(testbed.tag)
            raise ZeroDivisionError

    testbed, running = Testbed(HOME), list[subprocess.Popen[bytes]]()
    with pytest.raises(ZeroDivisionError):
        fail()
    (process,) = running
    assert process.wait(timeout=HANG_SECONDS) == -9
    assert _left(testbed.tag) == set()
    with pytest.raises(FileNotFoundError):
        testbed["pi-2"].set_cores(0.5)


def test_two_testbeds_do_not_meet(home: Testbed) -> None:
    with Testbed.of_shares((0.1, 0.1)) as other:
        assert home.devices[0].address == other.devices[0].address
        home.devices[0].set_rate(5)
        assert other.devices[0].rate_mbit is None
        with full_load.running(other.devices[0], "receive"):
            refused = home.devices[1].popen(
                [sys.executable, full_load.__file__, "send", "10.77.0.1"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            assert refused.wait(timeout=HANG_SECONDS) == 1


def test_a_testbed_whose_process_was_killed_goes_with_the_next_one() -> None:
    command = [sys.executable, "-m", "tools.testbed", "P1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT_FOLDER) as process:
        assert process.stdout is not None
        tag = process.stdout.readline().split(" as ")[1].split(";")[0]
        process.stdout.readline()
        assert (NAMESPACES / f"{tag}-0").exists()
        process.kill()
    with Testbed.of_shares((0.1,)):
        assert _left(tag) == set()
