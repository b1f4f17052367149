"""`--device`: read, probed, decided; machines are made up, as nothing here has an accelerator."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.devices.check import CheckReport
from p2ptrain.devices.interface import ComputeDevice, DeviceMemory, operator_name
from p2ptrain.devices.probes import Accelerator, FamilyProbe, probe_cuda, probe_mps, probe_xpu
from p2ptrain.devices.processor import HOST, Processor
from p2ptrain.devices.request import DeviceRequest, read_request, read_requests
from p2ptrain.devices.selection import ChosenDevice, DeviceChooser
from p2ptrain.errors import AcceleratorFailed, DeviceUnusable, OptionError

GB = 10**9

RTX = Accelerator("cuda:0", "NVIDIA GeForce RTX 3060", 12 * GB)

IRIS = Accelerator("xpu:0", "Intel Iris Xe Graphics", 8 * GB, is_integrated=True)

RIGHT = CheckReport(speedup=20.0)

NONE = FamilyProbe(absent="this torch is built without it: pip install another")


@pytest.mark.parametrize(
    ("text", "family", "index"),
    [("auto", "auto", None), ("cpu", "cpu", None), ("cuda:1", "cuda", 1), ("mps", "mps", None)],
)
def test_a_device_is_read_and_written_alike(text: str, family: str, index: int | None) -> None:
    assert read_request(text) == DeviceRequest(family, index)
    assert str(read_request(text)) == text


def test_several_are_read() -> None:
    assert [*map(str, read_requests("cuda:0, cuda:1,cpu"))] == ["cuda:0", "cuda:1", "cpu"]
    for text, words in (
        ("cuda:0,cuda:0", "twice"),
        ("auto,cpu", "name each"),
        ("cuda,cuda:1", "need their numbers"),
        ("cuda:0,", "is no device"),
    ):
        with pytest.raises(OptionError, match=words):
            read_requests(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu", r"'tpu' is no device of auto\|cpu\|cuda\[:N\]\|mps\|xpu"),
        ("rocm", "take cuda, which is torch's word for AMD's cards too"),
        ("GPU:0", "take auto"),
        ("cuda:-1", "is no device"),
        ("cuda:", "is no device"),
        ("cuda:0,cuda:1", "start one more member for each"),
        ("mps:1", "only one mps"),
        ("", "is no device"),
        (0, "must be a text"),
    ],
)
def test_what_is_no_device_is_refused_in_one_line(text: object, words: str) -> None:
    with pytest.raises(OptionError, match=words) as raised:
        read_request(text)
    assert "\n" not in str(raised.value)


# -- probes --------------------------------------------------------------------------------------


def built(
    *, cuda: str | None = None, hip: str | None = None, fails: str = "", cards: Any = ()
) -> Any:
    """A torch."""

    def init() -> None:
        if fails:
            raise RuntimeError(fails)

    api = SimpleNamespace(
        init=init,
        device_count=lambda: len(cards),
        get_device_properties=lambda index: cards[index],
        get_arch_list=lambda: ["sm_75", "sm_80", "sm_90", "compute_90"],
    )
    versions = SimpleNamespace(cuda=cuda, hip=hip)
    return SimpleNamespace(cuda=api, version=versions, __version__="2.12.0")


def card(name: str, major: int, minor: int, total_bytes: int = 12 * GB) -> Any:
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=total_bytes)


TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU\n"
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com"
)


@pytest.mark.parametrize(
    ("api", "has_driver", "words", "is_odd"),
    [
        (built(), False, "is built without CUDA: pip install torch", False),
        (built(), True, "an NVIDIA card is here, but this torch", True),
        (built(cuda="12.8", fails="Found no NVIDIA driver on your"), False, "no NVIDIA d", False),
        (built(cuda="12.8", fails=TOO_OLD), True, r"knows CUDA 11.4, and .* needs 12.8", True),
        (built(cuda="12.8", fails="No CUDA GPUs are available"), True, "shows no card", True),
        (built(cuda="12.8", fails="Error 803: x"), True, "does not start: Error 803", True),
    ],
)
def test_why_torch_finds_no_card(
    api: Any, has_driver: bool, words: str, is_odd: bool, tmp_path: Path
) -> None:
    file = tmp_path / "version"
    if has_driver:
        file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue")
    found = probe_cuda(api, file, tmp_path / "amdgpu")
    assert found.is_odd is is_odd
    with pytest.raises(DeviceUnusable, match=words) as raised:
        chooser(cuda=found).choose(DeviceRequest("cuda"))
    assert "\n" not in str(raised.value)


def test_who_has_amd_s_card_and_torch_for_nvidia_s_hears_of_the_other_build(tmp_path: Path) -> None:
    """torch of the package index is built for CUDA."""
    (tmp_path / "amdgpu").touch()
    here = tmp_path / "version", tmp_path / "amdgpu"
    found = probe_cuda(built(cuda="12.8", fails="Found no NVIDIA driver on your"), *here)
    assert "built for CUDA: for a card of AMD's pip install torch" in found.lack()
    assert not found.is_odd, "it may be graphics in a processor"


def test_cards_that_torch_finds_and_those_it_has_no_kernels_for(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue")
    old, new, newest = card("old", 6, 1), card("A4000", 8, 6), card("next", 12, 0)
    found = probe_cuda(built(cuda="12.8", cards=[old, new, newest]), file)
    assert [one.name for one in found.found] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [bool(one.unusable) for one in found.found] == [True, False, False]
    assert found.software == "torch 2.12.0, driver 550.54.15"
    assert chooser(cuda=found).choose(DeviceRequest("cuda")).device.name == "cuda:1"
    with pytest.raises(DeviceUnusable, match="has nothing for cards of compute"):
        chooser(cuda=found).choose(DeviceRequest("cuda", 0))
    amd = probe_cuda(built(hip="6.4", cards=[card("AMD Radeon", 11, 0)]), file)
    assert (amd.found[0].unusable, amd.software) == ("", "torch 2.12.0, ROCm 6.4")


def test_intel_and_apple() -> None:
    arc = SimpleNamespace(name="Arc B580", total_memory=12 * GB, driver_version="1.6")
    api = SimpleNamespace(
        xpu=SimpleNamespace(
            _is_compiled=lambda: True,
            device_count=lambda: 1,
            get_device_properties=lambda index: arc,
        ),
        backends=SimpleNamespace(
            mps=SimpleNamespace(is_built=lambda: True, is_available=lambda: True)
        ),
        mps=SimpleNamespace(recommended_max_memory=lambda: 12 * GB),
        __version__="2.12.0",
    )
    assert probe_xpu(api).found == (Accelerator("xpu:0", "Arc B580", 12 * GB),)
    mac = probe_mps(api, lambda: "15.1")
    assert (mac.found[0].name, mac.software) == ("mps", "torch 2.12.0, macOS 15.1")
    assert not probe_xpu(torch).found
    assert not probe_mps(torch).found


# -- the decision --------------------------------------------------------------------------------


class Fake(Processor):
    """A processor under another name."""

    is_host = False

    def __init__(self, name: str, free_bytes: int = 11 * GB) -> None:
        self.name, self._free = name, free_bytes

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._free, 12 * GB, 0)


def chooser(
    report: CheckReport = RIGHT,
    *,
    free_bytes: int = 11 * GB,
    fails: str = "",
    **probes: FamilyProbe,
) -> DeviceChooser:
    def make(name: str) -> ComputeDevice:
        if fails:
            raise AcceleratorFailed(fails)
        return Fake(name, free_bytes)

    known = {"cuda": NONE, "mps": NONE, "xpu": NONE, **probes}
    return DeviceChooser(
        lambda device, software: report,
        {family: lambda probe=probe: probe for family, probe in known.items()},  # type: ignore[misc]
        make,
    )


WITH_RTX = FamilyProbe((RTX,))

WRONG = CheckReport({"updates": "NaN"}, speedup=20.0)

SLOW = CheckReport(speedup=0.5)


@pytest.mark.parametrize(
    ("chooser", "name", "reason"),
    [
        (chooser(), "cpu", ""),
        (chooser(cuda=WITH_RTX), "cuda:0", "NVIDIA GeForce RTX 3060, 11.0 of 12.0 GB free: used"),
        (
            chooser(SLOW, xpu=FamilyProbe((IRIS,))),
            "cpu",
            "integrated GPU Intel Iris Xe Graphics: slower than this CPU, not used",
        ),
        (
            chooser(WRONG, cuda=WITH_RTX),
            "cpu",
            "NVIDIA GeForce RTX 3060: computes wrong: updates (NaN), not used",
        ),
        (
            chooser(free_bytes=GB // 10, cuda=WITH_RTX),
            "cpu",
            "NVIDIA GeForce RTX 3060, 0.1 of 12.0 GB free: too little, not used",
        ),
        (
            chooser(fails="cuda:0 does not start: out of memory", cuda=WITH_RTX),
            "cpu",
            "NVIDIA GeForce RTX 3060: cuda:0 does not start: out of memory: not used",
        ),
        (
            chooser(cuda=FamilyProbe(absent="the driver is too old", is_odd=True)),
            "cpu",
            "no GPU is used: the driver is too old",
        ),
        (chooser(xpu=FamilyProbe((IRIS,)), cuda=WITH_RTX), "cuda:0", "RTX 3060, 11.0 of 12"),
    ],
)
def test_auto_takes_what_computes_right_and_fast(
    chooser: DeviceChooser, name: str, reason: str
) -> None:
    chosen = chooser.choose(DeviceRequest())
    assert chosen.device.name == name
    assert reason in chosen.reason
    assert (chosen.device is HOST) is (name == "cpu")
    assert chosen.is_odd is (name == "cpu" and bool(reason))


@pytest.mark.parametrize(
    ("chooser", "index", "words"),
    [
        (chooser(), None, "device cuda: this torch is built without it: pip install another"),
        (chooser(cuda=WITH_RTX), 3, r"device cuda:3: .* but cuda:0 \(NVIDIA GeForce RTX 3060\)"),
        (chooser(free_bytes=GB // 10, cuda=WITH_RTX), None, "0.1 of 12.0 GB free: too little, so"),
        (chooser(fails="cuda:0 does not start: x", cuda=WITH_RTX), 0, "does not start: x"),
        (chooser(WRONG, cuda=WITH_RTX), 0, r"computes wrong: updates \(NaN\): take --device cpu"),
    ],
)
def test_what_is_asked_for_by_name_and_cannot_compute_is_an_error(
    chooser: DeviceChooser, index: int | None, words: str
) -> None:
    with pytest.raises(DeviceUnusable, match=words):
        chooser.choose(DeviceRequest("cuda", index))


def test_what_is_asked_for_by_name_may_be_slow_and_the_cpu_asks_nothing() -> None:
    assert chooser(SLOW, cuda=WITH_RTX).choose(DeviceRequest("cuda")).device.name == "cuda:0"
    assert chooser(cuda=WITH_RTX).choose(DeviceRequest("cpu")) == ChosenDevice()


@pytest.mark.parametrize("asked", [DeviceRequest(), DeviceRequest("cuda")])
def test_what_it_computes_wrong_is_named_and_left_to_the_host(asked: DeviceRequest) -> None:
    failures = {"silu": "NaN", "gelu in bfloat16": "off by 0.1 of the largest number"}
    report = dataclasses.replace(RIGHT, failures=failures)
    chosen = chooser(report, cuda=WITH_RTX).choose(asked)
    assert chosen.device.name == "cuda:0"
    assert chosen.is_odd
    assert chosen.reason.endswith(
        "used, but the CPU computes what it computes wrong: silu (NaN), gelu in bfloat16 (off by "
        "0.1 of the largest number)"
    )
    in_half_alone = {"silu": False, "mish": False, "hardswish": False, "gelu": True}
    assert chosen.device.wrong == in_half_alone
    assert chosen.device.kind == f"{Fake.kind}, CPU: silu, gelu in bfloat16", "other bits"


def test_what_is_wrong_in_float32_is_left_to_the_host_in_all_types() -> None:
    failures = {"conv2d in bfloat16": "NaN", "depthwise conv2d": "NaN"}
    wrong = CheckReport(failures).wrong_operators
    assert (wrong["conv2d"], wrong["conv1d"]) == (False, True)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("aten.conv2d.default", "conv2d"),
        ("aten.relu_.default", "relu"),
        ("aten.gelu_backward.default", "gelu"),
        ("aten._softmax_backward_data.default", "_softmax"),
        ("operator.mul", ""),
    ],
)
def test_operators_have_one_name(operator: str, name: str) -> None:
    assert operator_name(operator) == name
