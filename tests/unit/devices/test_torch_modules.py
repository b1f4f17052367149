"""What is asked of torch's modules for accelerators: as they have it, since none of them is here.

The modules are replaced by copies that know the same names and arguments, and do nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from p2ptrain.devices.check import settings_kept
from p2ptrain.devices.cuda import CudaDevice
from p2ptrain.devices.interface import DeviceMemory, tells_of_failure
from p2ptrain.devices.mps import MpsDevice
from p2ptrain.devices.probes import make_accelerator, numbered
from p2ptrain.devices.request import read_request
from p2ptrain.devices.streamed import StreamedDevice
from p2ptrain.devices.xpu import XpuDevice
from p2ptrain.errors import AcceleratorFailed

GB = 10**9

PROPERTIES = {
    "name": "Card",
    "total_memory": 12 * GB,
    "major": 9,
    "minor": 0,
    "has_fp64": False,
    "is_integrated_gpu": True,
}

LOST = "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"


def made(monkeypatch: pytest.MonkeyPatch, family: str) -> tuple[Any, Any]:
    """A device of that family, and torch's module that it calls."""
    module = create_autospec(getattr(torch, family))
    monkeypatch.setattr(torch, family, module)
    if family == "mps":
        backend = create_autospec(torch.backends.mps)
        backend.get_name.return_value = "Apple M2 Pro"
        monkeypatch.setattr(torch.backends, "mps", backend)
    else:
        module.get_device_name.return_value = "Card"
        module.get_device_properties.return_value = SimpleNamespace(**PROPERTIES)
        module.mem_get_info.return_value = (11 * GB, 12 * GB)
        module.memory_reserved.return_value = GB
        module.Event.return_value.elapsed_time.return_value = 1500.0
    return make_accelerator("mps" if family == "mps" else f"{family}:0"), module


@pytest.fixture
def settings() -> Iterator[None]:
    """Of the process, as they were."""
    cudnn, precise = torch.backends.cudnn, torch.backends.cuda.matmul
    parts = (torch.backends, cudnn, cudnn.conv, cudnn.rnn, precise)
    before = [part.fp32_precision for part in parts]
    tuned = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    with settings_kept():
        yield
    for part, precision in zip(parts, before, strict=True):
        part.fp32_precision = precision
    # the older flag last: torch keeps it apart, and raises where the two differ
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = tuned


@pytest.mark.parametrize("family", ["cuda", "xpu"])
@pytest.mark.usefixtures("settings")
def test_a_card_with_streams_is_called_as_its_module_has_it(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    card, module = made(monkeypatch, family)
    assert isinstance(card, StreamedDevice)
    card.prepare_thread()
    module.set_device.assert_called_once_with(card.place)
    assert torch.are_deterministic_algorithms_enabled()
    assert card.memory() == DeviceMemory(11 * GB, 12 * GB, GB)
    _, watch = card.timed(card.wait)
    assert watch.seconds() == 1.5
    filled = torch.zeros(2)
    copies = card.copy_out([torch.ones(2), None], [filled, None], written=True)
    asyncio.run(copies.arrived())
    copies.wait()
    assert filled.tolist() == [1.0, 1.0]
    card.release_cached()
    module.empty_cache.assert_called_once_with()
    card.allow_fast_math(allowed=True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_apples_graphics_are_called_as_their_module_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mac, module = made(monkeypatch, "mps")
    assert isinstance(mac, MpsDevice)
    assert (mac.title, mac.kind) == ("Apple M2 Pro", f"mps Apple M2 Pro, torch {torch.__version__}")
    module.recommended_max_memory.return_value = 12 * GB
    module.driver_allocated_memory.return_value = 5 * GB
    assert mac.memory() == DeviceMemory(7 * GB, 12 * GB, 5 * GB)
    _, watch = mac.timed(mac.wait)
    assert watch.seconds() >= 0
    mac.prepare_thread()
    mac.release_cached()
    assert module.synchronize.call_count == 3


def test_graphics_in_a_processor_of_intels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the host's memory, of which their driver does not say what is free."""
    card, module = made(monkeypatch, "xpu")
    assert isinstance(card, XpuDevice)
    assert card.is_in_host_memory
    assert card.lacks == {"float64", "complex128"}
    unsaid = "The device (Card) doesn't support querying the available free memory."
    module.mem_get_info.side_effect = RuntimeError(unsaid)
    assert card.memory() == DeviceMemory(11 * GB, 12 * GB, GB)
    module.mem_get_info.side_effect = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        card.memory()


def test_what_drivers_say_of_a_card_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    card, module = made(monkeypatch, "xpu")
    module.synchronize.side_effect = RuntimeError(LOST)
    with pytest.raises(AcceleratorFailed, match="xpu:0 has failed: level_zero"):
        card.wait()
    assert tells_of_failure(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    for text in ("CUDA error: out of memory", LOST.replace("DEVICE_LOST", "OUT_OF_RESOURCES")):
        assert not tells_of_failure(torch.AcceleratorError(text))
    assert not tells_of_failure(RuntimeError("shapes differ"))


@pytest.mark.usefixtures("settings")
def test_tensorfloat_is_off_whatever_a_script_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    card, _ = made(monkeypatch, "cuda")
    assert isinstance(card, CudaDevice)
    cudnn, precise = torch.backends.cudnn, torch.backends.cuda.matmul
    torch.backends.fp32_precision = "tf32"
    for allowed, precision in ((False, "ieee"), (True, "tf32"), (False, "ieee")):
        card.allow_fast_math(allowed=allowed)
        found = {part.fp32_precision for part in (precise, cudnn.conv, cudnn.rnn)}
        assert found == {precision}
        assert cudnn.benchmark is allowed
        assert cudnn.deterministic is not allowed


def test_ranks_of_one_machine_take_a_card_each(monkeypatch: pytest.MonkeyPatch) -> None:
    module = create_autospec(torch.cuda)
    monkeypatch.setattr(torch, "cuda", module)
    module.is_available.return_value, module.device_count.return_value = True, 2
    asked = [("auto", 1), ("cuda", 0), ("cuda:1", 0), ("cpu", 1), ("auto", 2)]
    found = [str(numbered(read_request(text), number)) for text, number in asked]
    assert found == ["cuda:1", "cuda:0", "cuda:1", "cpu", "auto"]
