"""Which accelerators this machine has, and why torch finds none where it finds none.

A probe asks torch and a file or two of the system; it takes no memory of a card. Each takes torch
as an argument, so that tests have machines of every kind.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from p2ptrain.devices.cuda import CudaDevice
from p2ptrain.devices.drivers import AMD_DRIVER, NVIDIA_DRIVER, nvidia_release
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.mps import MpsDevice, title_of
from p2ptrain.devices.request import AUTO, DeviceRequest
from p2ptrain.devices.streamed import is_integrated
from p2ptrain.devices.xpu import XpuDevice
from p2ptrain.errors import AcceleratorFailed

COLLECTIVES = "cpu:gloo,cuda:nccl"
"""What adds up over processes: backends of torch.distributed."""

_INSTALL = "see https://pytorch.org/get-started/locally"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One that torch has found.

    Attributes:
        name: as on the command line, such as "cuda:0".
        total_bytes: of its memory.
        is_integrated: it is a part of the processor's chip, or takes its memory.
        unusable: why this torch has nothing to run on it; empty where it has.
    """

    name: str
    title: str
    total_bytes: int = 0
    is_integrated: bool = False
    unusable: str = ""


@dataclass(frozen=True, slots=True)
class FamilyProbe:
    """What there is of one family.

    Attributes:
        absent: why nothing is found; empty where something is.
        advice: what to do about that; empty where nothing can be done.
        is_odd: the machine seems to have one all the same.
        software: torch's build and the driver: with another one, what was checked counts no more.
    """

    found: tuple[Accelerator, ...] = ()
    absent: str = ""
    advice: str = ""
    is_odd: bool = False
    software: str = ""

    def lack(self) -> str:
        """What `absent` and `advice` say, in one line."""
        return f"{self.absent}: {self.advice}" if self.advice else self.absent


def probe_cuda(
    api: Any = torch, nvidia_driver: Path = NVIDIA_DRIVER, amd_driver: Path = AMD_DRIVER
) -> FamilyProbe:
    """NVIDIA's cards, or AMD's where torch was built with ROCm."""
    has_nvidia, has_amd = nvidia_driver.exists(), amd_driver.exists()
    if not api.version.cuda and not api.version.hip:
        seen = "an NVIDIA card is here" if has_nvidia else "an AMD card is here" if has_amd else ""
        wanted = "ROCm" if has_amd and not has_nvidia else "CUDA"
        absent = (
            f"{seen}{', but ' if seen else ''}this torch ({api.__version__}) is built without "
            f"{wanted}"
        )
        advice = f"pip install torch of a build with it, {_INSTALL}"
        return FamilyProbe((), absent, advice, is_odd=has_nvidia)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says it
            api.cuda.init()
            count = api.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        absent, advice = _cuda_failure(str(error), api, has_amd)
        return FamilyProbe((), absent, advice, is_odd=has_nvidia or "too old" in absent)
    if not count:
        return FamilyProbe(absent="torch finds no card", is_odd=has_nvidia)
    found = tuple(_cuda_card(api, index) for index in range(count))
    driver = nvidia_release(nvidia_driver) if api.version.cuda else f"ROCm {api.version.hip}"
    return FamilyProbe(found, software=f"torch {api.__version__}, {driver}")


def _cuda_failure(text: str, api: Any, has_amd: bool) -> tuple[str, str]:
    """Why, and what to do."""
    line = " ".join(text.split())
    if (
        old := re.search(r"driver on your system is too old \(found version (\d+)\)", line)
    ) is not None:
        found = int(old[1])
        why = (
            f"the NVIDIA driver is too old: it knows CUDA {found // 1000}.{found % 1000 // 10}, "
            f"and this torch ({api.__version__}) needs {api.version.cuda}"
        )
        return why, f"update the driver, or pip install torch of an older build, {_INSTALL}"
    if "no NVIDIA driver" in line:
        if has_amd:
            why = f"there is no NVIDIA driver, and this torch ({api.__version__}) is built for CUDA"
            return why, f"for a card of AMD's pip install torch of the build with ROCm, {_INSTALL}"
        return "there is no NVIDIA driver", "install it, if this device has a card"
    if "No CUDA GPUs" in line or "No HIP GPUs" in line:
        return (
            "the driver shows no card",
            "see whether CUDA_VISIBLE_DEVICES or a container hides it",
        )
    return f"the driver does not start: {line[:200]}", "update it, or restart this device"


def _cuda_card(api: Any, index: int) -> Accelerator:
    found = api.cuda.get_device_properties(index)
    unusable = ""
    if api.version.cuda and not _has_kernels(api.cuda.get_arch_list(), found.major, found.minor):
        unusable = (
            f"torch {api.__version__} has nothing for cards of compute capability "
            f"{found.major}.{found.minor}: pip install torch of another build, {_INSTALL}"
        )
    return Accelerator(
        *(f"cuda:{index}", str(found.name), int(found.total_memory)),
        is_integrated(found),
        unusable,
    )


def _has_kernels(built_for: list[str], major: int, minor: int) -> bool:
    """Binaries run on the same major version from their minor on, portable code on all later."""
    for entry in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+?)(\d)[a-z]?", entry)
        if match is None:
            continue
        own = (int(match[2]), int(match[3]))
        if own <= (major, minor) and (match[1] == "compute" or own[0] == major):
            return True
    return not built_for


def probe_xpu(api: Any = torch) -> FamilyProbe:
    """Intel's cards, and the graphics in its processors."""
    if not hasattr(api, "xpu") or not api.xpu._is_compiled():
        absent = f"this torch ({api.__version__}) is built without XPU"
        return FamilyProbe((), absent, f"pip install torch of the build with it, {_INSTALL}")
    try:
        count = api.xpu.device_count()
        found = [api.xpu.get_device_properties(index) for index in range(count)]
    except (RuntimeError, AssertionError) as error:
        absent = f"the driver does not start: {_line(error)}"
        return FamilyProbe((), absent, "update it, or restart this device", is_odd=True)
    if not found:
        return FamilyProbe(
            (), "torch finds no card of Intel's", "install its driver, if it has one"
        )
    cards = tuple(
        Accelerator(
            *(f"xpu:{index}", str(card.name), int(card.total_memory)),
            is_integrated(card),
        )
        for index, card in enumerate(found)
    )
    driver = getattr(found[0], "driver_version", "of unknown version")
    return FamilyProbe(cards, software=f"torch {api.__version__}, driver {driver}")


def probe_mps(api: Any = torch, system: Callable[[], str] | None = None) -> FamilyProbe:
    """The graphics in Apple's chips."""
    if not api.backends.mps.is_built():
        absent = f"this torch ({api.__version__}) is built without MPS, which only Macs have"
        return FamilyProbe(absent=absent)
    if not api.backends.mps.is_available():
        return FamilyProbe(absent="MPS needs macOS 14 or newer, and a chip of Apple's")
    total_bytes = int(api.mps.recommended_max_memory())
    release = (system or _macos_release)()
    mac = Accelerator("mps", title_of(api.backends.mps), total_bytes, is_integrated=True)
    return FamilyProbe((mac,), software=f"torch {api.__version__}, macOS {release}")


def _macos_release() -> str:
    import platform

    return platform.mac_ver()[0]


PROBES: Mapping[str, Callable[[], FamilyProbe]] = MappingProxyType(
    {"cuda": probe_cuda, "mps": probe_mps, "xpu": probe_xpu}
)


def numbered(request: DeviceRequest, number: int) -> DeviceRequest:
    """Of several cards that with this number, where the request leaves open which."""
    is_open = request.family in (AUTO, "cuda") and request.index is None
    if is_open and torch.cuda.is_available() and number < torch.cuda.device_count():
        return DeviceRequest("cuda", number)
    return request


def make_accelerator(name: str) -> ComputeDevice:
    """The one of that name.

    Raises:
        AcceleratorFailed: it does not start; also where another program has all of its memory.
    """
    family, _, index = name.partition(":")
    try:
        if family == "mps":
            return MpsDevice()
        return CudaDevice(int(index)) if family == "cuda" else XpuDevice(int(index))
    except RuntimeError as error:  # out of memory among them
        raise AcceleratorFailed(f"{name} does not start: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
