"""What accelerators with streams have in common: NVIDIA's and AMD's, Intel's.

    compute   F0 F1 F2 B0 ...             one stream, in the order of the calls
    in        i1 i2 g0 ...                waits for nothing; `compute` waits for each copy
    out           o0 o1 o2 ...            each waits for what `compute` had been given before

The host's side of a copy lies in pinned memory, which the card reads and writes by itself. torch's
allocators keep the memory of a copy on its way from being used again (`record_stream`, and the
events of pinned blocks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.devices.interface import (
    ComputeDevice,
    DeviceMemory,
    DeviceWatch,
    HostCopies,
    Value,
    tells_of_failure,
)
from p2ptrain.errors import AcceleratorFailed


class StreamedDevice(ComputeDevice):
    """An accelerator whose module in torch has `Stream` and `Event`.

    What is called without a stream goes to the thread's current one: where no other
    has been set, as in the threads that make a device and compute with it, the card's default one.

    Args:
        module: such as `torch.xpu`.
        place: with its number.
    """

    is_host = False

    def __init__(self, module: ModuleType, place: torch.device) -> None:
        self._module: Any = module
        self.place = place
        self.name = str(place)
        with _failing(self.name):
            self.title = str(module.get_device_name(place))
            self.is_in_host_memory = is_integrated(module.get_device_properties(place))
            self._in = module.Stream(device=place)
            self._out = module.Stream(device=place)
            self._compute = module.current_stream(place)
        self.kind = f"{self.title}, torch {torch.__version__}"

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Pinned."""
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def copy_in(self, tensor: Tensor) -> Tensor:
        """On the stream `in`; the stream `compute` waits for it."""
        if tensor.device == self.place:
            return tensor
        source = tensor.detach().resolve_conj().resolve_neg()
        with _failing(self.name), torch.no_grad():
            with self._module.stream(self._in):
                inside = self._spread(source)
            self._compute.wait_stream(self._in)
            inside.record_stream(self._compute)
        return inside.requires_grad_(tensor.requires_grad)

    def _spread(self, source: Tensor) -> Tensor:
        """With its strides, which decide what operators compute with, and the order of sums."""
        flat = _flat(source)
        if flat is None:
            return source.to(self.place, non_blocking=True)
        return _laid_out(flat.to(self.place, non_blocking=True), source)

    def copy_out(
        self,
        tensors: Sequence[Value],
        into: Sequence[Value] | None = None,
        *,
        written: bool = False,
    ) -> HostCopies:
        """On the stream `out`, behind all that the stream `compute` has been given."""
        slots: Sequence[Value] = into or [None] * len(tensors)
        with _failing(self.name), torch.no_grad():
            self._out.wait_stream(self._compute)
            with self._module.stream(self._out):
                pairs = zip(tensors, slots, strict=True)
                copies = [self._copied_out(tensor, slot) for tensor, slot in pairs]
                event = self._module.Event()
                event.record(self._out)
            if written:
                self._compute.wait_event(event)
        return _Departing(copies, event, self.name)

    def _copied_out(self, tensor: Value, slot: Value) -> Value:
        if tensor is None:
            return None
        if tensor.device == self.place:
            source = tensor.detach().resolve_conj().resolve_neg()
            source.record_stream(self._out)
            if slot is not None:
                return slot.copy_(source, non_blocking=True)
            return self._new_copy(source)
        return tensor if slot is None else slot.copy_(tensor)

    def _new_copy(self, source: Tensor) -> Tensor:
        flat = _flat(source)
        if flat is None:
            made = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            return made.copy_(source, non_blocking=True)
        copy = self.host_buffer(flat.numel(), source.dtype).copy_(flat, non_blocking=True)
        return _laid_out(copy, source)

    def wait(self) -> None:
        """For all streams."""
        with _failing(self.name):
            self._module.synchronize(self.place)

    def stopwatch(self) -> DeviceWatch:
        """Of the stream `compute`."""
        with _failing(self.name):
            return _EventWatch(self._module, self._compute, self.name)

    def memory(self) -> DeviceMemory:
        """As the driver has it; what torch's allocator keeps counts as taken."""
        with _failing(self.name):
            free_bytes, total_bytes = self._module.mem_get_info(self.place)
            taken_bytes = self._module.memory_reserved(self.place)
        return DeviceMemory(int(free_bytes), int(total_bytes), int(taken_bytes))

    def release_cached(self) -> None:
        """Of torch's allocator."""
        with _failing(self.name):
            self._module.empty_cache()

    def prepare_thread(self) -> None:
        """Choose the device, and see that the same is computed every time."""
        with _failing(self.name):
            self._module.set_device(self.place)
        self.allow_fast_math(allowed=False)

    @staticmethod
    def _allow_any_order(allowed: bool) -> None:
        """Of sums: by atomics, where torch has both ways."""
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(not allowed, warn_only=True)


class _Departing(HostCopies):
    def __init__(self, tensors: list[Value], event: Any, name: str) -> None:
        self.tensors = tensors
        self._event = event
        self._name = name

    async def arrived(self) -> None:
        """A thread waits, as the driver cannot call an event loop."""
        with _failing(self._name):
            if self._event.query():
                return
        await run_in_background(self.wait)

    def wait(self) -> None:
        """For the event behind them."""
        with _failing(self._name):
            self._event.synchronize()


class _EventWatch(DeviceWatch):
    def __init__(self, module: Any, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._started = module.Event(enable_timing=True)
        self._stopped = module.Event(enable_timing=True)
        self._started.record(stream)

    def stop(self) -> None:
        """Mark the place in the stream."""
        self._stopped.record(self._stream)

    def seconds(self) -> float:
        """Between both marks."""
        with _failing(self._name):
            self._stopped.synchronize()
            return float(self._started.elapsed_time(self._stopped)) / 1000


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """What the driver reports, as ours; where memory lacks, torch's own error."""
    try:
        yield
    except RuntimeError as error:
        if not tells_of_failure(error):
            raise
        raise AcceleratorFailed.of(name, error) from error


def is_integrated(properties: object) -> bool:
    """Whether a card takes the host's memory: NVIDIA's and AMD's word for it, or Intel's."""
    words = ("is_integrated", "is_integrated_gpu")
    return any(bool(getattr(properties, word, False)) for word in words)


def _flat(tensor: Tensor) -> Tensor | None:
    """Its memory from the first to the last element, 1-D; None where most of that is others'."""
    if not tensor.numel():
        return tensor.reshape(-1)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.as_strided((extent,), (1,)) if extent <= 2 * tensor.numel() else None


def _laid_out(flat: Tensor, tensor: Tensor) -> Tensor:
    """The memory of `flat` with the tensor's shape and strides; no view, so that it is a leaf."""
    made = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())
