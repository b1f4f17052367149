"""What this device spends beside computing a model's units, from a few yardsticks.

The real cost of a message (event loop, tasks, kernel, a switch of threads) shows only in training.
So work of the same kind is timed here, and a constant says how much more the real thing costs: the
processor time of the event loop's thread by messages and bytes, over rounds of training on devices
of 0.3 core. The constants hold as far as devices that are slow at the one are as slow at the other.
Ciphers are why this is measured and not derived from the units' times: a small board without AES
instructions is many times slower at them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.net.decoder import FrameDecoder
from p2ptrain.net.encoder import OutgoingMessage
from p2ptrain.net.frame import Codec
from p2ptrain.net.message import Message, PartKind, Priority
from p2ptrain.plan.types.cluster import Overheads
from p2ptrain.profiling.unit_passes import CpuClock

YARDSTICK_SECONDS = 0.005
"""Processor time of each."""

FRAMED_A_MESSAGE = 16.0
"""One end of a real message costs as much as this many small ones framed and read again."""

BYTES_A_FRAMED = 33_000
"""So many bytes' way through copies and the kernel costs as much as one; ciphers come on top."""

UPDATE_FACTOR = 3.0
"""A real update, of many tensors that no cache holds, costs so many times the yardstick's."""

_PART_BYTES = 64

_CIPHER_BYTES = 64 * 1024

_UPDATE_FLOATS = 1 << 17

_INSIDE_FLOATS = 1 << 22
"""Of an accelerator's update: for fewer it takes as long as its kernels' starts."""

_COPIED_BYTES = 4 << 20


def measure_overheads(
    yardstick_seconds: float = YARDSTICK_SECONDS,
    clock: CpuClock | None = None,
    device: ComputeDevice = HOST,
) -> Overheads:
    """Run the yardsticks in the calling thread: processor seconds.

    Messages are the processor's in any case. What they carry is copied into an accelerator's
    memory, or out of it, and it is what updates weights.

    They are too short to tell what wall time that is on this device's share of its core, which
    comes in slices of ten milliseconds (`process/cpu_share.py`).

    Args:
        yardstick_seconds: processor time of each.
        clock: tests bring their own.
        device: what computes.
    """
    stopwatch = _Stopwatch(clock or CpuClock(), yardstick_seconds)
    framed = stopwatch.each(_Messages().frame_and_read)
    ciphers = stopwatch.each(_cipher()) / _CIPHER_BYTES
    copied, floats, factor = 0.0, _UPDATE_FLOATS, UPDATE_FACTOR
    inside = stopwatch
    if not device.is_host:
        inside = _Stopwatch(clock or CpuClock.of(device), yardstick_seconds)
        copied = inside.each(_copies(device)) / (2 * _COPIED_BYTES)
        floats, factor = _INSIDE_FLOATS, 1.0
    update = inside.each(_update(floats, device)) / (2 * 4 * floats)
    return Overheads(
        message_seconds=FRAMED_A_MESSAGE * framed,
        byte_seconds=framed / BYTES_A_FRAMED + ciphers / 2 + copied,
        update_byte_seconds=factor * update,
    )


@dataclass(frozen=True, slots=True)
class _Stopwatch:
    """Times by the processor time of this thread."""

    clock: CpuClock
    seconds: float

    def each(self, run: Callable[[], object]) -> float:
        """Processor seconds of one run: the median of as many as `seconds` hold, at least one.

        A run in which the thread lost its core counts what it had to fetch into its caches again.
        """
        run()
        begin, spent = self.clock.cpu(), 0.0
        runs: list[float] = []
        while not runs or spent < self.seconds:
            before = spent
            run()
            spent = self.clock.cpu() - begin
            runs.append(spent - before)
        return statistics.median(runs)


class _Messages:
    """Frames small messages and reads them again."""

    def __init__(self) -> None:
        self._part = memoryview(bytearray(_PART_BYTES))
        self._decoder = FrameDecoder(lambda _lane, _header: (self._part,), self._drop)
        self._number = 0

    def frame_and_read(self) -> None:
        """One message."""
        fields = {
            "job": "overheads",
            "generation": 1,
            "stage": 1,
            "flow": "activations",
            "first": 0,
        }
        message = Message("train.values", fields, (self._part,), (PartKind.ACTIVATION,))
        outgoing = OutgoingMessage(message, Priority.TENSOR)
        outgoing.start(self._number, lambda _kind, _part: Codec.RAW)
        self._number += 1
        while not outgoing.finished:
            frame = outgoing.next_frame()
            for buffer in frame.buffers if frame else ():
                self._read(memoryview(buffer))

    def _read(self, left: memoryview) -> None:
        while left:
            room = self._decoder.get_buffer()
            count = min(len(room), len(left))
            room[:count] = left[:count]
            self._decoder.received(count)
            left = left[count:]

    @staticmethod
    def _drop(_lane: Priority, _message: Message) -> None:
        """Nothing waits for it."""


def _cipher() -> Callable[[], object]:
    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    plain = bytes(_CIPHER_BYTES)
    return lambda: cipher.decrypt(nonce, cipher.encrypt(nonce, plain, None), None)


def _copies(device: ComputeDevice) -> Callable[[], object]:
    """In and out."""
    source = device.host_buffer(_COPIED_BYTES, torch.uint8)
    slot = device.host_buffer(_COPIED_BYTES, torch.uint8)
    return lambda: device.copy_out([device.copy_in(source)], [slot]).wait()


def _update(floats: int, device: ComputeDevice) -> Callable[[], object]:
    parameter, gradient, momentum = (device.copy_in(torch.ones(floats)) for _ in range(3))
    return lambda: parameter.add_(momentum.mul_(0.5).add_(gradient), alpha=-0.1)
