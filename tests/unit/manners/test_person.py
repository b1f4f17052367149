"""When a person has used a device last, by what its system says."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from p2ptrain.manners import readings
from p2ptrain.manners.readings import LinuxIdle, hinted_idle_seconds, input_interrupts

TABLE = """\
           CPU0       CPU1
  1:        {}         10  IO-APIC   1-edge      i8042
 24:      99999          0  PCI-MSI  0-edge      nvme0q0
109:          3          4  INTEL_I2C-HID        ELAN0670:00
"""


def test_interrupts_of_keyboards_and_touchpads_count() -> None:
    assert input_interrupts(TABLE.format(5)) == 5 + 10 + 3 + 4
    assert input_interrupts("  24:  1  0  PCI-MSI  nvme0q0") is None


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ("IdleHint=yes\nIdleSinceHintMonotonic=40000000\n", 60.0),
        ("IdleHint=no\nIdleSinceHintMonotonic=40000000\n", 0.0),
        ("IdleHint=no\nIdleSinceHintMonotonic=0\n", None),  # a desktop that never says it
        ("", None),
    ],
)
def test_logind_says_since_when(answer: str, seconds: float | None) -> None:
    assert hinted_idle_seconds(answer, 100.0) == seconds


def test_the_latest_sign_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, table = [1000.0], tmp_path / "interrupts"
    monkeypatch.setattr(readings.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(psutil, "users", list)
    table.write_text(TABLE.format(5))
    idle = LinuxIdle(table, lambda: None)
    now[0] += 50
    assert idle() == 50.0
    table.write_text(TABLE.format(6))
    assert idle() == 0.0
    now[0] += 7
    assert idle() == 7.0
    said = f"IdleHint=yes\nIdleSinceHintMonotonic={round((now[0] - 60) * 1e6)}"
    hinted = LinuxIdle(table, lambda: said)
    now[0] += 10
    assert hinted() == 10.0  # since it began to count


def test_where_nothing_can_be_seen_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "users", list)
    assert LinuxIdle(tmp_path / "none", lambda: None)() is None


def test_input_on_a_terminal_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = tmp_path / "tty"
    terminal.touch()
    os.utime(terminal, (time.time() - 30, time.time()))
    monkeypatch.setattr(psutil, "users", lambda: [SimpleNamespace(terminal=str(terminal))])
    assert LinuxIdle(tmp_path / "none", lambda: None)() == pytest.approx(30, abs=5)


def test_macos_says_it_in_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '    |   "HIDIdleTime" = 2500000000\n'
    monkeypatch.setattr(readings, "_said", lambda _command: answer)
    assert readings.mac_idle_seconds() == 2.5
