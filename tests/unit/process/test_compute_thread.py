"""The compute thread: what is urgent first, and nothing under way after a flush."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator

import pytest
import torch

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST, Processor
from p2ptrain.errors import AcceleratorFailed
from p2ptrain.process import compute_thread
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.process.host_process import SWITCH_SECONDS
from p2ptrain.process.memory_budget import is_out_of_memory
from tests.support.twin_device import TwinDevice


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    await thread.close()


class Held:
    """A task that runs until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.ended = False

    def __call__(self) -> None:
        self.begun.set()
        self.go.wait()
        self.ended = True

    async def begin(self, compute: ComputeThread) -> asyncio.Task[None]:
        """Run it, up to its middle."""
        task = asyncio.create_task(compute.run((0,), self))
        await asyncio.to_thread(self.begun.wait)
        return task


async def test_the_most_urgent_goes_first_and_among_equals_the_older(
    compute: ComputeThread,
) -> None:
    held, order = Held(), []
    first = await held.begin(compute)
    urgencies = [(1,), (0, 5), (1,), (0, 4)]
    tasks = [
        asyncio.create_task(compute.run(urgency, lambda n=number: order.append(n)))  # type: ignore[misc]
        for number, urgency in enumerate(urgencies)
    ]
    await asyncio.sleep(0)
    held.go.set()
    await asyncio.gather(first, *tasks)
    assert order == [3, 1, 0, 2]


async def test_a_flush_waits_for_a_task_whose_caller_has_gone(compute: ComputeThread) -> None:
    held = Held()
    task = await held.begin(compute)
    task.cancel()
    flushing = [asyncio.create_task(compute.flush()) for _ in range(2)]
    await asyncio.wait([task])
    assert not held.ended
    assert not any(flush.done() for flush in flushing)
    held.go.set()
    await asyncio.gather(*flushing)
    assert held.ended


async def test_a_flush_does_not_wait_for_what_has_not_begun(compute: ComputeThread) -> None:
    first, second = Held(), Held()
    running = await first.begin(compute)
    later = asyncio.create_task(compute.run((0,), second))
    flushing = asyncio.create_task(compute.flush())
    await asyncio.sleep(0)
    first.go.set()
    await asyncio.gather(running, flushing)
    second.go.set()
    await later


async def test_what_is_cancelled_before_it_begins_never_does(compute: ComputeThread) -> None:
    first, second = Held(), Held()
    running = await first.begin(compute)
    later = asyncio.create_task(compute.run((0,), second))
    await asyncio.sleep(0)
    later.cancel()
    await asyncio.wait([later])
    first.go.set()
    await running
    await compute.run((9,), lambda: None)
    assert not second.begun.is_set()


async def test_a_flush_of_an_idle_or_closed_thread_is_nothing(compute: ComputeThread) -> None:
    await compute.flush()
    await compute.run((0,), lambda: None)
    await compute.flush()
    await compute.close()
    await compute.flush()


async def test_no_thread_keeps_the_interpreter_from_it_for_long(compute: ComputeThread) -> None:
    assert sys.getswitchinterval() <= SWITCH_SECONDS + 1e-9


async def test_an_error_is_its_callers(compute: ComputeThread) -> None:
    def fail() -> None:
        raise MemoryError("mine")

    with pytest.raises(MemoryError, match="mine"):
        await compute.run((0,), fail)
    await compute.flush()


async def test_memory_that_a_card_lacks_is_no_failed_card() -> None:
    """Pinned memory neither, of which the driver speaks as of a failure."""
    twin = TwinDevice()
    thread = ComputeThread(device=twin)

    def fail(message: str) -> None:
        raise torch.AcceleratorError(message)

    with pytest.raises(torch.AcceleratorError) as lacking:
        await thread.run((0,), lambda: fail("CUDA error: out of memory"))
    assert is_out_of_memory(lacking.value)
    assert thread.device is twin
    with pytest.raises(AcceleratorFailed):
        await thread.run((0,), lambda: fail("CUDA error: unspecified launch failure"))
    await thread.run((0,), lambda: None)
    assert thread.device is not twin
    await thread.close()


async def test_a_slow_device_rests_after_each_task_and_the_rest_is_part_of_its_time(
    compute: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a slower one. The rest ends where there is no more need for it."""
    clock = [0.0]

    def work(seconds: float) -> None:
        clock[0] += seconds

    def rest(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 100:
            compute.share = 1.0

    monkeypatch.setattr(compute_thread, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(compute_thread, "sleep", rest)
    compute.share = 0.25
    _, span, _ = await compute.run_timed((0,), lambda: work(1.0))
    assert span.wall == pytest.approx(4.0)
    await compute.run((0,), lambda: work(0.5))
    assert clock[0] == pytest.approx(6.0)
    await compute.run((0,), lambda: work(94.0))
    assert clock[0] == pytest.approx(100.0, abs=0.1)
    await compute.run((0,), lambda: work(10.0))
    assert clock[0] == pytest.approx(110.0, abs=0.1)


async def test_the_time_in_a_queue_is_not_a_tasks_own(
    compute: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, log = Held(), ["asked"]

    def clock() -> float:
        log.append("clock")
        return 10.0 * len(log)

    first = await held.begin(compute)
    monkeypatch.setattr(compute_thread, "perf_counter", clock)
    monkeypatch.setattr(compute_thread, "thread_clock", lambda: lambda: float(len(log)))
    waiting = asyncio.create_task(compute.run_timed((0,), lambda: log.append("works")))
    await asyncio.sleep(0)
    log.append("waits")
    held.go.set()
    await first
    assert await waiting == (None, CpuSpan(wall=20.0, cpu=2.0), 30.0)
    assert log == ["asked", "waits", "clock", "works", "clock"]


class _Card(Processor):
    """Sees to nothing of the host's."""

    def prepare_thread(self) -> None:
        """See the class."""


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush")
@pytest.mark.parametrize("device", [HOST, _Card()])
async def test_denormals_are_zero_in_this_thread_alone(device: ComputeDevice) -> None:
    """Whatever computes: the host may make updates beside an accelerator."""
    compute = ComputeThread(device=device)
    smallest = torch.full((8,), torch.finfo(torch.float32).tiny)

    def faint_gradient() -> torch.Tensor:
        weight = torch.ones(8, requires_grad=True)
        (weight * smallest * 0.5).sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert not (await compute.run((0,), faint_gradient)).any()
    assert faint_gradient().count_nonzero() == 8  # an app's own threads count as before
    await compute.close()


async def test_the_end_of_an_iterator_reaches_the_caller_too(compute: ComputeThread) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await compute.run((0,), lambda: next(iter(())))
