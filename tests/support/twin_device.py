"""A device for tests that behaves like an accelerator, and computes what the processor does.

Its memory is its own, its copies take time, its memory ends, it fails and computes wrong numbers
when a test wants it to. `twin_tensor` has its tensors, `twin_copies` its copies.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from p2ptrain.devices.interface import ComputeDevice, DeviceMemory, DeviceWatch, HostCopies, Value
from p2ptrain.errors import AcceleratorFailed
from tests.support.twin_copies import Copies, CopyOut, Span, poison
from tests.support.twin_tensor import PLACE, Allocation, TwinTensor, enter, placed

TICK_SECONDS = 1e-3
"""That an operator takes, for the twin's stopwatch."""


class TwinDevice(ComputeDevice):
    """See the module.

    Attributes:
        place: the same for all twins of a process: torch gives a backend in Python one device.
            Their tensors do not mix all the same.
        misuses: what an accelerator would not have minded, and computed nonsense of.
        host_waits: (operator, shape) of what made the host wait: a copy through pageable memory,
            `.item()`, `nonzero`.
        call_names: operators and methods in the order of their calls.
        others_bytes: of its memory, taken by other programs.
        fast_math: what was allowed, one after the other.
    """

    title = "Twin of an accelerator"
    place = PLACE
    is_host = False

    def __init__(
        self,
        *,
        name: str = "twin:0",
        kind: str = "twin",
        total_bytes: int = 1 << 33,
        most_ticks: int = 32,
        seed: int = 0,
    ) -> None:
        """Make one, with nothing in it.

        Args:
            total_bytes: the size of its memory.
            most_ticks: that a copy takes after the one before; 0 = copies are done at once.
            seed: of the ticks that each takes, and of its own random numbers.
        """
        self.name, self.kind = name, kind
        self.generator = torch.Generator().manual_seed(seed + 0x7717)
        self.others_bytes = 0
        self.fast_math: list[bool] = []
        self.call_names: list[str] = []
        self.host_waits: list[tuple[str, tuple[int, ...]]] = []
        self._total_bytes = total_bytes
        self._taken_bytes = 0
        self._allocations: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._copies = Copies(seed, most_ticks)
        self._fails_from: float = float("inf")
        self._late: torch.OutOfMemoryError | None = None
        self._wrong: dict[str, tuple[bool, Callable[[Tensor], object]]] = {}
        self._threads = 0

    # -- what tests want of it -------------------------------------------------------------------

    @property
    def misuses(self) -> list[str]:
        """See the class."""
        return self._copies.misuses

    def fail_from(self, call: int) -> None:
        """The operator of that number, and all that follows, fails as if the card were gone."""
        self._fails_from = call

    def fail_now(self) -> None:
        """From the next call on."""
        self.fail_from(len(self.call_names))

    def compute_wrong(
        self,
        operator: str,
        *,
        backward: bool = False,
        how: Callable[[Tensor], object] = poison,
    ) -> None:
        """Change the results of an operator, such as "aten.mm.default".

        Args:
            backward: only where a backward calls it.
            how: is given each result.
        """
        self._wrong[operator] = (backward, how)

    def step_clock(self, ticks: int) -> None:
        """Let time pass."""
        for _ in range(ticks):
            self._copies.tick()

    def live(self) -> list[tuple[int, ...]]:
        """Shapes of all tensors that take memory now."""
        self._copies.run_all()
        if self._taken_bytes:
            gc.collect()  # what is in a ring of references is no leak
        return sorted(allocation.shape for allocation in self._allocations)

    def assert_empty(self) -> None:
        """Nothing is left of what was computed, and nobody misused the copies."""
        shapes = self.live()
        assert not shapes, f"{len(shapes)} tensors are left in {self.name}: {shapes[:20]}"
        self.assert_well_used()

    def assert_well_used(self) -> None:
        """Nobody wrote to what was being copied, nor read it."""
        self._copies.run_all()
        assert not self.misuses, self.misuses

    # -- what p2ptrain asks of it ----------------------------------------------------------------

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """As torch's allocator gives it, full of NaN."""
        buffer = torch.empty(elements, dtype=dtype)
        poison(buffer)
        return buffer

    def copy_in(self, tensor: Tensor) -> Tensor:
        """Filled when an operator reads it, and watched for longer."""
        if isinstance(tensor, TwinTensor):
            if tensor.allocation.space is not self:
                raise RuntimeError(f"{tensor!r} is given to {self.name}")
            return tensor
        self._reach("copy_in")
        with torch.no_grad():
            source = tensor.detach().resolve_conj().resolve_neg()
            extent = 1 + sum(
                (n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True)
            )
            if source.numel() and extent <= 2 * source.numel():
                inner = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
            else:
                inner = torch.empty(source.shape, dtype=source.dtype)
            inside = placed(inner, self)
            self._copies.copy_in(source, inner)
        return inside.requires_grad_(tensor.requires_grad)

    def copy_out(
        self,
        tensors: Sequence[Value],
        into: Sequence[Value] | None = None,
        *,
        written: bool = False,
    ) -> HostCopies:
        """Some time after all that was called."""
        self._reach("copy_out")
        self._copies.fill()
        slots: Sequence[Value] = into or [None] * len(tensors)
        found: list[Value] = []
        begun: list[CopyOut] = []
        with torch.no_grad():
            for tensor, slot in zip(tensors, slots, strict=True):
                found.append(self._copied_out(tensor, slot, written, begun))
        return _TwinCopies(self, self._copies, found, begun)

    def _copied_out(self, tensor: Value, slot: Value, written: bool, begun: list[CopyOut]) -> Value:
        if tensor is None:
            return None
        if not isinstance(tensor, TwinTensor):
            return tensor if slot is None else slot.copy_(tensor)
        if tensor.allocation.space is not self:
            raise RuntimeError(f"{tensor!r} is copied out of {self.name}")
        source = tensor.inner.resolve_conj().resolve_neg()
        if slot is None:
            slot = torch.empty_like(source)
        keep = tensor.allocation
        copy = self._copies.copy_out(source, tensor.span, slot, written=written, keep=keep)
        begun.append(copy)
        return slot

    def wait(self) -> None:
        """For all copies."""
        self._reach("wait")
        self._copies.run_all()

    def stopwatch(self) -> DeviceWatch:
        """Of the twin's own time."""
        return _TickWatch(self._copies)

    def memory(self) -> DeviceMemory:
        """Of what lives."""
        free_bytes = self._total_bytes - self._taken_bytes - self.others_bytes
        return DeviceMemory(max(free_bytes, 0), self._total_bytes, self._taken_bytes)

    def release_cached(self) -> None:
        """It keeps none."""
        self._reach("release_cached")

    def prepare_thread(self) -> None:
        """This thread computes for the twin."""
        enter(self)
        torch.set_flush_denormal(True)
        self._threads = torch.get_num_threads()

    def allow_fast_math(self, *, allowed: bool) -> None:
        """It computes as ever."""
        self.fast_math.append(allowed)

    def check(self) -> None:
        """Raises AcceleratorFailed: it has failed."""
        if len(self.call_names) >= self._fails_from:
            raise AcceleratorFailed(f"{self.name} has failed: the card has fallen off the bus")

    def _reach(self, method: str) -> None:
        self._raise_late()
        self.call_names.append(method)
        if len(self.call_names) > self._fails_from:
            raise AcceleratorFailed(f"{self.name} has failed: the card has fallen off the bus")

    def _raise_late(self) -> None:
        """What failed in a backward: its error is raised by the first call after it.

        In autograd's thread torch ends the process instead (`std::terminate`): its guard of the
        stream asks Python for the kind of device, in a destructor, while the exception passes.
        """
        error, self._late = self._late, None
        if error is not None:
            raise error

    # -- what its tensors ask of it (`twin_tensor.Space`) ----------------------------------------

    def calls(self, operator: str) -> None:
        """Time passes; an operator of a card that is gone raises what torch does."""
        if not _in_backward():
            self._raise_late()
        self.call_names.append(operator)
        if len(self.call_names) > self._fails_from and not _in_backward():
            raise torch.AcceleratorError(f"{self.name} error: the card has fallen off the bus")
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # in autograd's thread, for the same bits
        torch.set_flush_denormal(True)
        self._copies.tick()

    def fills(self) -> None:
        """It waits for the copies in."""
        self._copies.fill()

    def changes(self, span: Span) -> None:
        """Copies out of there are done before, or never."""
        self._copies.changing(span)

    def waits(self, operator: str, shape: tuple[int, ...]) -> None:
        """Note it."""
        self.host_waits.append((operator, shape))

    def takes(self, nbytes: int, shape: tuple[int, ...]) -> Allocation:
        """As long as there is some."""
        free_bytes = self.memory().free_bytes
        if nbytes > free_bytes:
            text = (
                f"{self.name} out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB. The twin "
                f"has a total capacity of {self._total_bytes / 2**20:.2f} MiB of which "
                f"{free_bytes / 2**20:.2f} MiB is free."
            )
            self._late = torch.OutOfMemoryError(text)
            if not _in_backward():
                self._raise_late()
        allocation = Allocation(self, nbytes, shape)
        with self._copies.lock:
            self._taken_bytes += nbytes
            self._allocations.add(allocation)
        return allocation

    def gives_back(self, allocation: Allocation) -> None:
        """It can be taken again."""
        with self._copies.lock:
            self._taken_bytes -= allocation.nbytes

    def results(self, operator: str, results: Sequence[Tensor]) -> None:
        """Make them wrong where a test wants it."""
        backward, how = self._wrong.get(operator, (False, None))
        if how is None or (backward and not _in_backward()):
            return
        for result in results:
            if result.is_floating_point():
                how(result)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _TwinCopies(HostCopies):
    def __init__(
        self, device: TwinDevice, copies: Copies, tensors: list[Value], begun: list[CopyOut]
    ) -> None:
        self.tensors = tensors
        self._device, self._copies, self._begun = device, copies, begun

    async def arrived(self) -> None:
        """The event loop goes on, and so does time."""
        while not all(copy.is_done for copy in self._begun):
            self._device.check()
            self._copies.tick()
            await asyncio.sleep(0)
        self._device.check()

    def wait(self) -> None:
        """Time passes until they are there."""
        self._device.check()
        for copy in self._begun:
            self._copies.run(copy)


class _TickWatch(DeviceWatch):
    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._started = self._stopped = copies.now

    def stop(self) -> None:
        """Read the twin's clock."""
        self._stopped = self._copies.now

    def seconds(self) -> float:
        """Between both."""
        return (self._stopped - self._started) * TICK_SECONDS
