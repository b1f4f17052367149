"""Counters of energy, from files as Linux has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from p2ptrain.process.energy import NO_ACCESS, NO_COUNTER, EnergyMeter

RANGE_JOULES = 1000


def zone(root: Path, name: str, kind: str, joules: float) -> None:
    files = {"name": kind, "energy_uj": round(joules * 1e6), "max_energy_range_uj": 10**6}
    write(root / "class/powercap" / name, files | {"max_energy_range_uj": RANGE_JOULES * 10**6})


def write(folder: Path, files: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def battery(root: Path, **files: object) -> None:
    write(root / "class/power_supply/BAT0", {"type": "Battery", "status": "Discharging", **files})


def test_packages_and_memory_are_added_up_over_a_wrap_around(tmp_path: Path) -> None:
    """Parts of a package are in it, `psys` has everything, `mmio` is the same once more."""

    def counters(first: float, second: float, memory: float, others: float) -> None:
        zone(tmp_path, "intel-rapl:0", "package-0", first)
        zone(tmp_path, "intel-rapl:1", "package-1", second)
        zone(tmp_path, "intel-rapl:0:1", "dram", memory)
        zone(tmp_path, "intel-rapl:0:0", "core", others)
        zone(tmp_path, "intel-rapl:2", "psys", others)
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", others)

    counters(10, 990, 5, 0)
    meter = EnergyMeter(tmp_path)
    assert meter.read().joules == 0.0
    counters(14, 2, 6.5, 500)
    found = meter.read()
    assert found.joules == pytest.approx(4 + (2 + RANGE_JOULES - 990) + 1.5)
    assert found.sources == ("its processor and memory (RAPL)",)
    assert found.why == ""
    assert meter.read().joules == found.joules


def test_counters_that_only_root_may_read_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    read_text = Path.read_text

    def refusing(path: Path, *arguments: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", refusing)
    found = EnergyMeter(tmp_path).read()
    assert (found.joules, found.sources, found.why) == (None, (), NO_ACCESS)


def test_without_counters_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert EnergyMeter(tmp_path).read().why == NO_COUNTER
    monkeypatch.setattr("sys.platform", "darwin")
    assert "darwin" in EnergyMeter(tmp_path).read().why
    monkeypatch.setattr("sys.platform", "linux")
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    write(tmp_path / "class/powercap/intel-rapl:0", {"energy_uj": "none"})
    assert "cannot be read" in EnergyMeter(tmp_path).read().why


@pytest.mark.parametrize(
    "files",
    [{"power_now": 8_000_000}, {"current_now": -800_000, "voltage_now": 10_000_000}],
    ids=["watts", "ampere"],
)
def test_a_battery_that_discharges_tells_the_whole_device(
    files: Mapping[str, object], tmp_path: Path
) -> None:
    now = [100.0]
    battery(tmp_path, **files)
    meter = EnergyMeter(tmp_path, clock=lambda: now[0])
    now[0] += 10
    found = meter.read()
    assert found.joules == pytest.approx(80.0)
    assert found.sources == ("the whole device (battery)",)
    battery(tmp_path, **files, status="Charging")
    assert meter.read().joules is None


def test_a_card_is_counted_beside_what_the_processor_hides(tmp_path: Path) -> None:
    used = [50.0]

    def card() -> float:
        if used[0] < 0:
            raise RuntimeError("NVML: gone")
        return used[0]

    meter = EnergyMeter(tmp_path, card)
    used[0] = 70.0
    found = meter.read()
    assert found.joules == 20.0
    assert found.sources == ("its card (NVML)",)
    assert found.why
    used[0] = -1.0
    assert "gone" in meter.read().why or meter.read().joules is None
