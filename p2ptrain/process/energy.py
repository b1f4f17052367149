"""How much energy this device uses, where its own counters tell it.

    RAPL       the processor's packages and its memory, all programs together
               (/sys/class/powercap)
    NVML       an NVIDIA card, all programs together (nvidia-ml-py)
    battery    the whole device, while it runs on its battery (/sys/class/power_supply)

Nothing is subtracted: what the device would use without training is part of it. What none of them
tells is unknown, and the reading says why. RAPL: Intel SDM volume 3B, section 16.10; the files:
https://docs.kernel.org/power/powercap/powercap.html
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

SYS = Path("/sys")

_PACKAGE = re.compile(r"[a-z-]*rapl:[0-9]+")

_PART = re.compile(r"[a-z-]*rapl:[0-9]+:[0-9]+")

NO_ACCESS = "no RAPL access: needs root or a udev rule"

NO_COUNTER = "no counter that p2ptrain can read"


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """What a device has used since its meter was made.

    Attributes:
        joules: None: it cannot be measured.
        sources: what is counted, in words.
        why: what is not, or why nothing is; "" where all is.
    """

    joules: float | None
    sources: tuple[str, ...] = ()
    why: str = ""

    @property
    def words(self) -> str:
        """What can be measured here, for others."""
        missing = f"not measurable: {self.why}" if self.joules is None else self.why
        return ", without: ".join(filter(None, (" and ".join(self.sources), missing)))


class EnergyMeter:
    """Adds up what the counters say from one reading to the next. Not thread-safe.

    Args:
        root: of the counters' files.
        card: what an NVIDIA card has used since its driver was loaded, in joules; None = no card.
        clock: for batteries, which say watts.
    """

    def __init__(
        self,
        root: Path = SYS,
        card: Callable[[], float] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._root, self._card, self._clock = root, card, clock
        self._joules = 0.0
        self._last: dict[str, float] = {}  # of each counter
        self._watts: tuple[float, float] | None = None  # of the battery, and when
        self.read()

    def read(self) -> EnergyReading:
        """Once in ten minutes at least: counters of processors begin again at their largest."""
        sources: list[str] = []
        whys: list[str] = []
        for read in (self._processor, self._battery):  # the whole device, where parts are unknown
            source, why = read()
            if source:
                sources.append(source)
                whys.clear()
                break
            whys.append(why)
        if self._card is not None:
            source, why = self._of_card(self._card)
            sources += [source] if source else []
            whys += [] if source else [why]
        why = next((why for why in whys if why), "")
        return EnergyReading(self._joules if sources else None, tuple(sources), why)

    def _processor(self) -> tuple[str, str]:
        """(what is counted, why nothing is)."""
        counters, why = {}, NO_COUNTER if sys.platform == "linux" else _elsewhere()
        try:
            for zone in _zones(self._root):
                used = int((zone / "energy_uj").read_text()) / 1e6
                largest = int((zone / "max_energy_range_uj").read_text()) / 1e6
                counters[zone.name] = used, largest
        except PermissionError:
            return "", NO_ACCESS
        except (OSError, ValueError) as error:
            return "", f"its RAPL counters cannot be read: {error}"
        for name, (used, largest) in counters.items():
            more = used - self._last.get(name, used)
            self._joules += more if more >= 0 else more + largest
            self._last[name] = used
        return ("its processor and memory (RAPL)", "") if counters else ("", why)

    def _battery(self) -> tuple[str, str]:
        watts = 0.0
        try:
            for battery in sorted(self._root.glob("class/power_supply/*")):
                if (battery / "type").read_text().strip() != "Battery":
                    continue
                if (battery / "status").read_text().strip() == "Discharging":
                    watts += _watts(battery)
        except (OSError, ValueError):
            watts = 0.0
        if not watts:
            self._watts = None
            return "", ""
        now = self._clock()
        if self._watts is not None:
            before, at = self._watts
            self._joules += (before + watts) / 2 * (now - at)
        self._watts = watts, now
        return "the whole device (battery)", ""

    def _of_card(self, card: Callable[[], float]) -> tuple[str, str]:
        try:
            used = card()
        except Exception as error:  # whatever the library raises
            return "", f"its card does not say: {error}"
        self._joules += max(used - self._last.get("card", used), 0.0)
        self._last["card"] = used
        return "its card (NVML)", ""


def _zones(root: Path) -> Iterator[Path]:
    """Packages, and memory beside them; the parts of a package are in it, `psys` has all of it."""
    for zone in sorted(root.glob("class/powercap/*")):
        if "mmio" in zone.name:  # the same package by another way
            continue
        is_package, is_part = _PACKAGE.fullmatch(zone.name), _PART.fullmatch(zone.name)
        if is_package or is_part:
            name = (zone / "name").read_text().strip()
            if (is_package and name.startswith("package")) or (is_part and name == "dram"):
                yield zone


def _watts(battery: Path) -> float:
    if (battery / "power_now").exists():
        return int((battery / "power_now").read_text()) / 1e6
    current, voltage = (
        int((battery / f"{what}_now").read_text()) for what in ("current", "voltage")
    )
    return abs(current) / 1e6 * voltage / 1e6


def _elsewhere() -> str:
    return f"p2ptrain reads no energy counter on {sys.platform}"


def nvidia_counter(uuid: str) -> Callable[[], float] | None:
    """What a card has used, in joules; None where nvidia-ml-py, or the card's counter, is not."""
    try:
        library: Any = importlib.import_module("pynvml")
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
        library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # its own kinds of errors; the card is left out then
        return None
    return lambda: float(library.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
