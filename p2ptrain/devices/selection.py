"""Which device computes, and why: what was asked for, what is here, and what it does right.

    asked ──► probes ──► candidates, best first ──► made ──► room? right? fast? ──► device, reason
              (torch)    (pure)                     (torch)  (pure)

With `auto` each candidate that falls through leaves its reason, and the processor computes. One
that was asked for by its name is an error where it cannot compute at all; a slow one is obeyed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from p2ptrain.devices.check import CheckReport
from p2ptrain.devices.interface import ComputeDevice, DeviceMemory
from p2ptrain.devices.probes import PROBES, Accelerator, FamilyProbe, make_accelerator
from p2ptrain.devices.processor import HOST
from p2ptrain.devices.request import AUTO, HOST_NAME, DeviceRequest
from p2ptrain.errors import AcceleratorFailed, DeviceUnusable

LEAST_FREE_BYTES = 512 << 20
"""torch's own kernels and workspaces take about as much."""


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """What computes.

    Attributes:
        reason: one line for the user; empty where nothing but the processor is here.
        is_odd: the user may have expected something else.
    """

    device: ComputeDevice = HOST
    reason: str = ""
    is_odd: bool = False

    @classmethod
    def checked(cls, device: ComputeDevice, report: CheckReport, shown: str) -> ChosenDevice:
        """An accelerator; what it computes wrong is its host's from now on.

        It is of another kind then: its bits are those of both.
        """
        reason = f"{shown}: used"
        if report.failures:
            device.wrong = report.wrong_operators
            device.kind = f"{device.kind}, CPU: {', '.join(report.failures)}"
            named = (f"{kind} ({why})" for kind, why in report.failures.items())
            reason += f", but the CPU computes what it computes wrong: {', '.join(named)}"
        return cls(device, reason, bool(report.failures))


Check = Callable[[ComputeDevice, str], CheckReport]
"""(device, its software) -> what it computes right."""


@dataclass(frozen=True)
class DeviceChooser:
    """Chooses among what the probes find; tests hand in their own.

    Attributes:
        check: see `Check`; it may answer from what it has kept.
    """

    check: Check
    probes: Mapping[str, Callable[[], FamilyProbe]] = field(default_factory=lambda: PROBES)
    make: Callable[[str], ComputeDevice] = make_accelerator
    least_free_bytes: int = LEAST_FREE_BYTES

    def choose(self, request: DeviceRequest) -> ChosenDevice:
        """The device that is to compute. Takes seconds where one is checked.

        Raises:
            DeviceUnusable: the one that was asked for by name cannot compute here.
        """
        if request.family == HOST_NAME:
            return ChosenDevice()
        families = self.probes if request.family == AUTO else [request.family]
        probed = {family: self.probes[family]() for family in families}
        if request.family != AUTO:
            return self._named(request, probed[request.family])
        return self._best(probed)

    def _named(self, request: DeviceRequest, probe: FamilyProbe) -> ChosenDevice:
        wanted = candidate(request, probe)
        try:
            device = self.make(wanted.name)
            memory = device.memory()
            wrong = lacks_room(memory, self.least_free_bytes)
            if wrong:
                raise DeviceUnusable(f"device {request}: {room_text(wanted, memory)}: {wrong}")
            report = self.check(device, probe.software)
        except AcceleratorFailed as error:
            raise DeviceUnusable(f"device {request}: {wanted.title}: {error}") from error
        if (useless := report.useless) is not None:
            raise DeviceUnusable(f"device {request}: {wanted.title} {useless}: take --device cpu")
        return ChosenDevice.checked(device, report, room_text(wanted, memory))

    def _best(self, probed: Mapping[str, FamilyProbe]) -> ChosenDevice:
        refused: list[str] = []
        for one in preferred(probe for probe in probed.values()):
            software = next(probe.software for probe in probed.values() if one in probe.found)
            chosen = self._tried(one, software)
            if isinstance(chosen, ChosenDevice):
                return chosen
            refused.append(chosen)
        odd = [probe.lack() for probe in probed.values() if probe.is_odd and probe.absent]
        reason = "; ".join([*refused, *(f"no GPU is used: {text}" for text in odd)])
        return ChosenDevice(reason=reason, is_odd=bool(reason))

    def _tried(self, one: Accelerator, software: str) -> ChosenDevice | str:
        """Why not, where it is not used."""
        if one.unusable:
            return f"{one.title}: {one.unusable}: not used"
        try:
            device = self.make(one.name)
            memory = device.memory()
            shown = room_text(one, memory)
            if lacks_room(memory, self.least_free_bytes):
                return f"{shown}: too little, not used"
            report = self.check(device, software)
        except AcceleratorFailed as error:
            return f"{one.title}: {error}: not used"
        if report.useless is not None:
            return f"{one.title}: {report.useless}, not used"
        if report.is_slow:
            integrated = "integrated GPU " if one.is_integrated else ""
            return f"{integrated}{one.title}: slower than this CPU, not used"
        return ChosenDevice.checked(device, report, shown)


def candidate(request: DeviceRequest, probe: FamilyProbe) -> Accelerator:
    """The one that is asked for by its family, or its number.

    Raises:
        DeviceUnusable: there is none, or this torch has nothing for it.
    """
    if not probe.found:
        raise DeviceUnusable(f"device {request}: {probe.lack()}")
    usable = [one for one in probe.found if not one.unusable]
    if request.index is not None:
        if request.index >= len(probe.found):
            there = ", ".join(f"{one.name} ({one.title})" for one in probe.found)
            raise DeviceUnusable(f"device {request}: this device has no such one, but {there}")
        wanted = probe.found[request.index]
    else:
        wanted = preferred([probe])[0] if usable else probe.found[0]
    if wanted.unusable:
        raise DeviceUnusable(f"device {request}: {wanted.title}: {wanted.unusable}")
    return wanted


def preferred(probes: Iterable[FamilyProbe]) -> Sequence[Accelerator]:
    """Best first: usable ones, then cards of their own, then those with much memory."""
    found = [one for probe in probes for one in probe.found]
    return sorted(found, key=lambda one: (bool(one.unusable), one.is_integrated, -one.total_bytes))


def lacks_room(memory: DeviceMemory, least_free_bytes: int) -> str:
    """What to do where nothing fits; empty where something does."""
    if memory.free_bytes >= least_free_bytes:
        return ""
    return "too little, so close the programs that use it, or take --device cpu"


def room_text(one: Accelerator, memory: DeviceMemory) -> str:
    """Such as "NVIDIA GeForce RTX 3060, 11.2 of 12.6 GB free"."""
    free, total = (f"{part / 1e9:.1f}" for part in (memory.free_bytes, memory.total_bytes))
    return f"{one.title}, {free} of {total} GB free"
