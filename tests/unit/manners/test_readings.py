"""What this machine's sensors say, and machines without them."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from p2ptrain.manners.readings import DeviceReader, DeviceReading


def test_this_machine_can_be_read() -> None:
    reader = DeviceReader(lambda: 3.0)
    first = reader()
    assert isinstance(first, DeviceReading)
    assert first.others_cpu is None  # there is no time that it would be of
    assert first.idle_seconds == 3.0
    assert first.available_bytes is not None
    assert first.available_bytes > 0


def test_what_this_process_computes_is_not_the_load_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = SimpleNamespace(user=0.0, system=0.0)
    all_cores = [(0.0, 0.0), (8.0, 2.0)]  # busy, idle
    monkeypatch.setattr(psutil, "cpu_times", lambda: Times(*all_cores.pop(0)))
    reader = DeviceReader()
    monkeypatch.setattr(reader, "_own_seconds", lambda: used.user)
    reader()
    used.user = 6.0
    assert reader().others_cpu == pytest.approx(0.2)


def test_a_machine_without_sensors_or_with_broken_ones_knows_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> object:
        raise OSError("its driver fails")

    for battery, heat in ((broken, broken), (lambda: None, lambda: {})):
        monkeypatch.setattr(psutil, "sensors_battery", battery)
        monkeypatch.setattr(psutil, "sensors_temperatures", heat, raising=False)
        found = DeviceReader()()
        assert (found.on_battery, found.battery, found.temperature_c) == (None, None, None)


def test_sensors_are_read_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    battery = SimpleNamespace(percent=55, power_plugged=False)
    chips = {"core": [SimpleNamespace(current=61.0), SimpleNamespace(current=65261.0)]}
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips, raising=False)
    found = DeviceReader()()
    assert (found.on_battery, found.battery, found.temperature_c) == (True, 0.55, 61.0)


class Times(tuple[float, float]):
    """Of all cores."""

    def __new__(cls, busy: float, idle: float) -> Times:
        return super().__new__(cls, (busy, idle))

    @property
    def idle(self) -> float:
        return self[1]
