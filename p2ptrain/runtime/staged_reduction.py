"""All-reduce of gradients that an accelerator computes: the sums are made in host memory.

Each chunk of a ring comes from the network and goes to it, so that it is in host memory anyway; a
gradient crosses to the host once, while the backward runs, and its sum crosses back once. And
devices of any kind add the same numbers in the same order.

    accelerator   backward: final(a) final(b) ...                 update
                      | copy out                                    ^ copy in
    host              a         b ... --> ring: sums of buckets ----+
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor, nn

from p2ptrain.devices.interface import HostCopies
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import StreamId
from p2ptrain.model.stage.stage import Stage
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.runtime.allreduce import RingAllReduce
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.runtime.reduced_tensors import ReducedTensors


class HostGradients:
    """In host memory: what is summed of a stage on an accelerator.

    Attributes:
        parameters: with the gradients of this device, then with the sums: the stage's where it is
            updated here, else like them. Values of those are never written, and take no memory.
        statistics: the sums of the stage's running statistics.
    """

    def __init__(self, stage: Stage) -> None:
        self.parameters: Mapping[str, nn.Parameter] = stage.parameters()
        self.statistics = {} if stage.statistics is None else stage.statistics.totals
        if not stage.home.is_host:
            self.parameters = {
                name: nn.Parameter(_unwritten(parameter), requires_grad=parameter.requires_grad)
                for name, parameter in self.parameters.items()
            }
            self.statistics = {n: _unwritten(t) for n, t in self.statistics.items()}


def _unwritten(tensor: Tensor) -> Tensor:
    strides = torch.empty_like(tensor, device="meta").stride()
    return torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype)


class StagedReduction(RingAllReduce):
    """The all-reduce of a stage on an accelerator."""

    def __init__(
        self,
        summed: ReducedTensors,
        stream: StreamId,
        devices: Sequence[str],
        own: str,
        router: TensorRouter,
        *,
        host: HostGradients,
        stage: Stage,
        compute: ComputeThread,
    ) -> None:
        """`summed` is what `host` has of the stage; the rest as `RingAllReduce`."""
        super().__init__(summed, stream, devices, own, router)
        self._host = host
        self._stage = stage
        self._compute = compute
        self._lock = Lock()  # `final` comes from autograd's thread
        self._leaving: dict[str, HostCopies] = {}  # by parameter, in the order of the backward
        self._has_left: set[str] = set()
        self._statistics: HostCopies | None = None
        self._more = asyncio.Event()

    def begin(self, order: RoundOrder) -> None:
        """A round of training starts."""
        self._has_left.clear()
        self._statistics = None
        super().begin(order)

    def final(self, name: str) -> None:
        """Copy that gradient out; the ring gets it once it has arrived. Thread-safe."""
        with self._lock:
            self._copy_out(name)
        self._loop.call_soon_threadsafe(self._more.set)

    def _copy_out(self, name: str) -> None:
        if name in self._has_left:
            return
        self._has_left.add(name)
        self._copy_statistics_out()
        gradient = self._stage.inside()[name].grad
        leaving = [None if gradient is None else _dense(gradient)]
        self._leaving[name] = self._stage.device.copy_out(leaving)

    def _copy_statistics_out(self) -> None:
        """They are complete since the last forward."""
        statistics, slots = self._stage.statistics, self._host.statistics
        if statistics is not None and self._statistics is None:
            sums = [*statistics.sums.values()]
            self._statistics = self._stage.device.copy_out(sums, [*slots.values()])

    def all_final(self) -> None:
        """What has not been said to be final is so once it has arrived: `finish` sees to it."""

    async def finish(self) -> None:
        """Wait until every gradient is the group's sum where the stage is updated."""
        await self._compute.run((0,), self._copy_rest_out)
        self._more.set()
        while self._leaving:
            await self._hand_over()
        if self._statistics is not None:
            await self._statistics.arrived()
        super().all_final()
        await super().finish()
        await self._compute.run((0,), self._copy_in)

    def _copy_rest_out(self) -> None:
        with self._lock:
            for name, parameter in self._stage.inside().items():
                if parameter.requires_grad:
                    self._copy_out(name)
            self._copy_statistics_out()  # of a stage whose weights are frozen

    def _copy_in(self) -> None:
        own = self._stage.inside()
        if self._stage.home.is_host:
            self._stage.device.wait()  # it has read what the update writes to
            for parameter in own.values():
                parameter.grad = None
            return
        for name, parameter in self._host.parameters.items():
            if parameter.requires_grad:
                total = parameter.grad
                own[name].grad = None if total is None else self._stage.device.copy_in(total)
                parameter.grad = None
        if self._stage.statistics is not None:
            for name, total in self._stage.statistics.sums.items():
                total.copy_(self._stage.device.copy_in(self._host.statistics[name]))

    async def run(self) -> None:
        """Exchange until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run())
            group.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._leaving:
                await self._hand_over()

    async def _hand_over(self) -> None:
        """The oldest gradient that leaves, once it has arrived."""
        with self._lock:
            name, copies = next(iter(self._leaving.items()))
        await copies.arrived()
        if self._statistics is not None:
            await self._statistics.arrived()
        if self._leaving.get(name) is not copies:  # `run` or `finish` was faster
            return
        del self._leaving[name]
        (gradient,) = copies.tensors
        self._host.parameters[name].grad = gradient
        super().final(name)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
