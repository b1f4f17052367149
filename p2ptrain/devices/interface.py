"""What p2ptrain asks of the thing that computes: a processor, or an accelerator beside it.

    host memory                              memory of the device
    what arrives --- copy_in ------------->  inputs, weights
                     (its own stream)        forward, backward, update   (one stream, in order)
    what is sent <-- copy_out -------------  outputs, gradients, copies
                     (its own stream)

Everything that other devices see (frames, snapshots, sums of a group) is in host memory. Calls
come from the compute thread and return before the device has done the work; whatever needs the
result waits for it: `HostCopies.arrived` on the event loop, `wait` in a thread. On the processor
the two memories are one, and nothing is copied or waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from p2ptrain.devices.drivers import INTEL_ERROR, MEMORY_TEXTS

T = TypeVar("T")

Value: TypeAlias = Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of the device itself.

    Attributes:
        free_bytes: that no program has taken.
        taken_bytes: what this process has taken of it, its allocator's cache included.
    """

    free_bytes: int
    total_bytes: int
    taken_bytes: int


class HostCopies(ABC):
    """Tensors in host memory that a device fills.

    Attributes:
        tensors: valid once they have arrived; before, they may be cut and queued, not read.
    """

    tensors: list[Value]

    @abstractmethod
    async def arrived(self) -> None:
        """Wait until they may be read; the event loop runs meanwhile."""

    @abstractmethod
    def wait(self) -> None:
        """The same for a thread."""


class Arrived(HostCopies):
    """What is in host memory already."""

    def __init__(self, tensors: Sequence[Value]) -> None:
        self.tensors = list(tensors)

    async def arrived(self) -> None:
        """They are there."""

    def wait(self) -> None:
        """They are there."""


class DeviceWatch(ABC):
    """The seconds that the device computes for some calls."""

    @abstractmethod
    def stop(self) -> None:
        """All calls are made; the device may still compute."""

    @abstractmethod
    def seconds(self) -> float:
        """Wait until it has, and return them."""


class ComputeDevice(ABC):
    """One processor or accelerator, for one compute thread.

    Attributes:
        name: as on the command line, such as "cpu".
        title: as people know it, such as "NVIDIA H100 80GB HBM3".
        kind: devices of one kind compute the same bits (vendor, architecture, torch's build).
        place: torch's name for its memory.
        is_host: its memory is the host's: nothing is copied, and nothing waited for.
        is_in_host_memory: of an accelerator: what it takes is taken of the host's memory.
        lacks: types of numbers that it has not, such as "float64".
        nvidia_id: as NVIDIA's driver names it; None where that has no part.
        wrong: by `operator_name`, what stages compute on the host because the device does it wrong
            -> whether that is so in bfloat16 alone.
    """

    name: str
    title: str
    kind: str
    place: torch.device
    is_host: bool
    is_in_host_memory: bool = False
    lacks: frozenset[str] = frozenset()
    nvidia_id: str | None = None
    wrong: Mapping[str, bool] = MappingProxyType({})

    @abstractmethod
    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised, 1-D, in host memory that copies in and out are fastest from and to."""

    @abstractmethod
    def copy_in(self, tensor: Tensor) -> Tensor:
        """The tensor in the device's memory, with its strides; itself if it is there.

        What is called afterwards in the compute thread finds it filled. `tensor` may be dropped at
        once, and not written to before the device has read it. Outside any graph.
        """

    @abstractmethod
    def copy_out(
        self,
        tensors: Sequence[Value],
        into: Sequence[Value] | None = None,
        *,
        written: bool = False,
    ) -> HostCopies:
        """Copies in host memory, as they are after all calls so far.

        A tensor that is in host memory already is itself its copy, where nothing is to be filled.

        Args:
            into: tensors to fill, laid out alike; None or a missing one: new memory.
            written: later calls write to the tensors, and wait for the copies.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block until everything that was called has been done.

        Raises:
            AcceleratorFailed: the device has failed meanwhile.
        """

    @abstractmethod
    def stopwatch(self) -> DeviceWatch:
        """Started; for the calls that follow."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """As it is now."""

    @abstractmethod
    def release_cached(self) -> None:
        """Give memory that only the allocator holds back to other programs."""

    @abstractmethod
    def prepare_thread(self) -> None:
        """Called once in the thread that will compute, before anything else."""

    @abstractmethod
    def allow_fast_math(self, *, allowed: bool) -> None:
        """Whether operands may be rounded from now on, and sums be made in any order.

        In the compute thread. Where a device has one way to compute, it stays at that.
        """

    def fetched(self, tensors: Sequence[Value]) -> list[Value]:
        """`copy_out`, waited for."""
        copies = self.copy_out(tensors, written=True)
        copies.wait()
        return copies.tensors

    def copied_in(self, tensors: Sequence[Value]) -> list[Value]:
        """`copy_in` of each."""
        return [None if tensor is None else self.copy_in(tensor) for tensor in tensors]

    def timed(self, function: Callable[[], T]) -> tuple[T, DeviceWatch]:
        """What it returns, and a watch that was running meanwhile."""
        watch = self.stopwatch()
        result = function()
        watch.stop()
        return result, watch


def operator_name(operator: str) -> str:
    """Such as "linear" of "aten.linear.default", in place or not, or of a backward that a model
    brings; "" where it is none of torch's."""
    library, _, rest = operator.partition(".")
    name = rest.partition(".")[0].rstrip("_")
    return name.removesuffix("_data").removesuffix("_backward") if library == "aten" else ""


def tells_of_failure(error: BaseException) -> bool:
    """Whether torch reports that a card or its driver has failed; not that memory lacks."""
    text = str(error)
    is_of_driver = isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and INTEL_ERROR in text
    )
    return is_of_driver and not any(lack in text for lack in MEMORY_TEXTS)
